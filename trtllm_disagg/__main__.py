"""The command `trtllm-disagg`, also as `python -m trtllm_disagg`."""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: trtllm-disagg needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}")

from trtllm_disagg.common.interpreter import leave_current_directory


def main() -> None:
    """Ctrl-C during the imports ends the command like Ctrl-C during its work."""
    try:
        from trtllm_disagg.common import cli
    except KeyboardInterrupt:
        from trtllm_disagg.common.exits import ExitCode

        sys.exit(ExitCode.INTERRUPTED)
    cli.main()


if __name__ == "__main__":
    leave_current_directory()
    main()

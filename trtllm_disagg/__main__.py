"""The command `trtllm-disagg`, also as `python -m trtllm_disagg`."""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: trtllm-disagg needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}")

from trtllm_disagg.processes.interpreter import leave_current_directory


def main() -> None:
    """Ctrl-C during the imports before `cli.main` ends the command as one during its work does."""
    try:
        from trtllm_disagg import cli
    except KeyboardInterrupt:
        from trtllm_disagg.processes.exits import ExitCode

        sys.exit(ExitCode.INTERRUPTED)
    cli.main()


if __name__ == "__main__":
    leave_current_directory()
    main()

"""Makes what `make release` publishes: a wheel and a source distribution, byte for byte reproducible, and an SBOM.

Every time in them is that of the commit (SOURCE_DATE_EPOCH), every owner is 0, every mode 644 or 755, and names are
sorted. Only committed files are included.

    python -m tools.release dist
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

from trtllm_disagg import __version__

ROOT = Path(__file__).parents[1]
#: Of requirements/, without those of tests, docs and releases, which are in no deployment.
_TO_RUN = ("torch.txt", "base.txt", "dynamo.txt")
#: The earliest time that a zip archive can have.
_EARLIEST = 315532800


def build(source: Path, out: Path, epoch: int) -> tuple[Path, Path]:
    """Builds the source distribution, and the wheel from it. Writes into `source`, too."""
    command = [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", out, source]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    normalise_sdist(sdist, epoch)
    normalise_wheel(wheel, epoch)
    return sdist, wheel


def normalise_sdist(path: Path, epoch: int) -> None:
    with tarfile.open(path) as archive:
        members = [(member, archive.extractfile(member)) for member in archive.getmembers()]
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as written:
            for member, content in sorted(members, key=lambda pair: pair[0].name):
                member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
                member.mode = _mode(member.mode if member.isfile() else 0o755)
                member.pax_headers = {}
                written.addfile(member, content)
    path.write_bytes(gzip.compress(plain.getvalue(), mtime=epoch))


def normalise_wheel(path: Path, epoch: int) -> None:
    with zipfile.ZipFile(path) as archive:
        members = [(member, archive.read(member)) for member in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as written:
        # RECORD comes last, as is usual in wheels.
        for member, content in sorted(
            members, key=lambda pair: (pair[0].filename.endswith("/RECORD"), pair[0].filename)
        ):
            plain = zipfile.ZipInfo(member.filename, time.gmtime(max(epoch, _EARLIEST))[:6])
            plain.compress_type = zipfile.ZIP_DEFLATED
            plain.create_system = 3
            plain.external_attr = (0o100000 | _mode(member.external_attr >> 16)) << 16
            written.writestr(plain, content)


def _mode(mode: int) -> int:
    return 0o755 if mode & 0o100 else 0o644


def release(out: Path) -> None:
    """Builds the last commit into `out`."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout

    if git("status", "--porcelain"):
        sys.exit("error: there are changes that are not committed; a release is made of a commit")
    epoch = int(git("log", "-1", "--format=%ct"))
    out.mkdir(exist_ok=True)
    if any(out.iterdir()):
        sys.exit(f"error: {out} is not empty")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
            archive.extractall(folder, filter="tar")
        built = build(Path(folder), out, epoch)
    for path in built:
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")


def write_sbom(path: Path) -> None:
    """Writes a CycloneDX SBOM of the packages that requirements/ pins to run."""
    pins = "".join((ROOT / "requirements" / name).read_text(encoding="utf-8") for name in _TO_RUN)
    program = str(Path(sys.executable).with_name("cyclonedx-py"))
    command = [
        program,
        "requirements",
        "-",
        "--output-reproducible",
        "--pyproject",
        str(ROOT / "pyproject.toml"),
    ]
    sbom = json.loads(subprocess.run(command, input=pins.encode(), check=True, capture_output=True).stdout)
    # cyclonedx-py does not read a dynamic version.
    sbom["metadata"]["component"]["version"] = __version__
    path.write_text(json.dumps(sbom, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    release(Path(sys.argv[1]))
    write_sbom(Path(sys.argv[1]) / "sbom.cdx.json")

"""Builds a release for `make release`: reproducible wheel and source distribution, and an SBOM.

    python -m scripts.release VERSION [dist]

Contains committed files only, sorted, with the commit's time (SOURCE_DATE_EPOCH), owner 0, and mode 644 or 755. Without
a folder, checks only whether this commit may be released as VERSION.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

from trtllm_disagg import __version__

ROOT = Path(__file__).parents[1]
#: Files of requirements/ that deployments use.
_TO_RUN = ("torch.txt", "base.txt", "dynamo.txt")
#: Earliest time in a zip archive.
_EARLIEST = 315532800


def build(source: Path, out: Path, epoch: int) -> tuple[Path, Path]:
    """Builds the source distribution, and from it the wheel. Also writes into `source`."""
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
        # RECORD comes last, as usual in wheels.
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


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def require_releasable(version: str) -> None:
    """Exits unless the commit is clean, and code and CHANGELOG.md say `version`."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"error: VERSION: {version!r} is not allowed; expected x.y.z: make release VERSION=x.y.z")
    if git("status", "--porcelain"):
        sys.exit("error: there are changes that are not committed; a release is made of a commit")
    if f"\n## {version} (" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        sys.exit(f"error: CHANGELOG.md has no entry '## {version} (YYYY-MM-DD)'")
    if version != __version__:
        sys.exit(f"error: trtllm_disagg/__init__.py says {__version__!r}; commit {version!r} there first")


def tag_command(version: str) -> str:
    """The command that tags the last commit as `version`."""
    commit = git("rev-parse", "--short", "HEAD").decode().strip()
    return f"git tag -a v{version} -m 'trtllm-disagg {version}' {commit}"


def release(out: Path) -> None:
    """Builds the last commit into `out`."""
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
    """Writes a CycloneDX SBOM of the runtime packages that requirements/ pins."""
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
    version, *folder = sys.argv[1:] or [""]
    require_releasable(version)
    for out in map(Path, folder):
        release(out)
        write_sbom(out / "sbom.cdx.json")
        print(f"to publish it: {tag_command(version)}")

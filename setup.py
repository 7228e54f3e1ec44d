"""What goes into a wheel, and its version; all else is in pyproject.toml.

A wheel has one top-level name, `starling_node`: the packages `node` and `protocols` lie in its folder `code`, and no
import is rewritten. An editable install (`make install`) leaves them where they are. Every other build replaces the
version in its copy of `node/_version.py`: 0.2.0 at the tag v0.2.0, else 0.2.0+g<commit>.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent
IS_EDITABLE = "editable_wheel" in sys.argv
CODE = "starling_node.code"
VERSION_FILE = "node/_version.py"
CHECKOUT = "+checkout"


def git(*arguments: str) -> str:
    command = ["git", "-C", str(HERE), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=30).stdout.strip()


def version() -> str:
    found = re.search(r'^VERSION = "(.+)"$', (HERE / VERSION_FILE).read_text(), re.MULTILINE)
    assert found, VERSION_FILE
    plain = found[1].removesuffix(CHECKOUT)
    if IS_EDITABLE or plain == found[1] or not (HERE / ".git").exists():
        return found[1]
    try:
        commit = git("describe", "--always", "--abbrev=10", "--dirty", "--exclude=*")
        released = f"v{plain}" in git("tag", "--points-at", "HEAD").split() and "-" not in commit
    except (OSError, subprocess.SubprocessError) as error:  # no git, or a checkout of another user
        print(f"the version stays {found[1]}: {error}", file=sys.stderr)
        return found[1]
    return plain if released else f"{plain}+g{commit.replace('-', '.')}"


VERSION = version()


def write_version(file: Path) -> None:
    text = file.read_text()
    file.unlink()  # it may be a hard link to the source
    file.write_text(re.sub(r'^VERSION = ".+"$', f'VERSION = "{VERSION}"', text, flags=re.MULTILINE))


class BuildCode(build_py):
    def run(self) -> None:
        super().run()
        if not IS_EDITABLE:
            write_version(Path(self.build_lib, *CODE.split("."), VERSION_FILE))


class SourceArchive(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_version(Path(base_dir, VERSION_FILE))


packages = find_packages(str(HERE), include=["node*", "protocols*"])
prefix = "" if IS_EDITABLE else f"{CODE}."
setup(
    version=VERSION,
    packages=["starling_node", *(prefix + each for each in packages)],
    package_dir={} if IS_EDITABLE else {CODE: ""},
    package_data={f"{prefix}node.page": ["static/*", "static/vendor/*"]},
    cmdclass={"build_py": BuildCode, "sdist": SourceArchive},
)

"""Builds the C library of econmt_ops; everything else stands in pyproject.toml.

The setup.py of the repository, which packages econmt_ops with econmt, and that of econmt_runtime take the library from
here. ECONMT_PLATFORM names another system than this one, for which zig builds it.
"""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PACKAGE_DATA = {
    "econmt_ops": ["py.typed"],
    "econmt_ops.backends.c": ["*.c", "*.h"],
    "econmt_ops.backends.cuda": ["*.cu", "*.cuh"],
}
PLATFORMS = runpy.run_path(str(Path(__file__).with_name("econmt_ops") / "backends/c/platforms.py"))
PLATFORM = os.environ.get("ECONMT_PLATFORM") or None


class BuildKernels(build_ext):
    """Builds the C library with the compiler of the environment variable CC, or that Python was built with.

    Without one the package is whole, only slower.

    Attributes:
        cost: What is lost without the library, in the words of the warning.
    """

    cost = "training on the CPU will be slower"

    def get_ext_filename(self, fullname: str) -> str:
        """Returns the library's file, which has no part of Python in its name."""
        return f"{fullname.replace('.', os.sep)}.{PLATFORM or PLATFORMS['HERE']}.so"

    def build_extension(self, ext: Extension) -> None:
        """Builds it, or says in one line why not."""
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        try:
            PLATFORMS["compile_library"](library.parent, PLATFORM)
        except OSError as error:
            if PLATFORM:
                raise
            name = self.distribution.get_name()
            self.warn(str(error))
            self.warn(
                f"{name} is installed without its C library, so {self.cost}; to build it, install gcc or set CC, then "
                f"install {name} again"
            )


class NameWheel(bdist_wheel):
    """Names a wheel after the library's system, for any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns Python, ABI and system."""
        here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        return "py3", "none", PLATFORMS["PLATFORMS"][PLATFORM][1] if PLATFORM else here


LIBRARY = "econmt_ops.backends.c._kernels"
COMMANDS = {"build_ext": BuildKernels, "bdist_wheel": NameWheel}

if __name__ == "__main__":
    setup(
        packages=find_packages(),
        package_data=PACKAGE_DATA,
        ext_modules=[Extension(LIBRARY, [], optional=True)],
        cmdclass=COMMANDS,
    )

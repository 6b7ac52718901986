"""Builds the C library of econmt_ops; everything else stands in pyproject.toml.

The setup.py of the repository, which packages econmt_ops with econmt, and that of econmt_runtime take it from here.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

PACKAGE_DATA = {
    "econmt_ops": ["py.typed"],
    "econmt_ops.backends.c": ["*.c", "*.h"],
    "econmt_ops.backends.cuda": ["*.cu", "*.cuh"],
}
LIBRARY = "econmt_ops.backends.c._kernels"
BUILDING = runpy.run_path(str(Path(__file__).with_name("econmt_ops") / "backends" / "c" / "platforms.py"))


class BuildKernels(build_ext):
    """Builds the C library with the compiler of the environment variable CC, or that Python was built with.

    Without one the package is whole, only slower.

    Attributes:
        cost: What is lost without the library, in the words of the warning.
        system: Name of the system in platforms.py for which zig builds it; None: this one.
    """

    cost = "training on the CPU will be slower"
    system: str | None = None

    def get_ext_filename(self, fullname: str) -> str:
        """Returns the library's file, which has no part of Python in its name."""
        return f"{fullname.replace('.', os.sep)}.{self.system or BUILDING['HERE']}.so"

    def build_extension(self, ext: Extension) -> None:
        """Builds it, or says in one line why not."""
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        try:
            BUILDING["compile_library"](library.parent, self.system)
        except OSError as error:
            if self.system:
                raise
            name = self.distribution.get_name()
            self.warn(str(error))
            self.warn(
                f"{name} is installed without its C library, so {self.cost}; to build it, install gcc or set CC, then "
                f"install {name} again"
            )


if __name__ == "__main__":
    setup(
        packages=find_packages(),
        package_data=PACKAGE_DATA,
        ext_modules=[Extension(LIBRARY, [], optional=True)],
        cmdclass={"build_ext": BuildKernels},
    )

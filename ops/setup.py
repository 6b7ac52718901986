"""Builds the C library of econmt_ops; everything else stands in pyproject.toml.

The setup.py of the repository, which packages econmt_ops with econmt, takes the library from here.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

PACKAGE_DATA = {
    "econmt_ops": ["py.typed"],
    "econmt_ops.backends.c": ["*.c", "*.h"],
    "econmt_ops.backends.cuda": ["*.cu", "*.cuh"],
}


def extensions(prefix: str = "", name: str = "econmt_ops.backends.c._kernels") -> list[Extension]:
    """Returns the C library.

    Args:
        prefix: Path from the folder of the running setup.py to this one. name: Module that the library is installed as.
    """
    folder = f"{prefix}econmt_ops/backends/c"
    library = Extension(
        name,
        [f"{folder}/kernels.c"],
        # A source distribution holds them too.
        depends=[f"{prefix}setup.py", *sorted(map(str, Path(folder).glob("*.h")))],
        libraries=["m"],
        # They come after the flags with which Python itself was built, and the last ones count.
        extra_compile_args=list(runpy.run_path(f"{folder}/platforms.py")["FLAGS"]),
        optional=True,
    )
    return [library] if os.name == "posix" else []


class BuildKernels(build_ext):
    """Builds the C library with the compiler that Python was built with, or that of the environment variable CC.

    Without one the package is whole, only slower.

    Attributes:
        cost: What is lost without the library, in the words of the warning.
    """

    cost = "training on the CPU will be slower"

    def build_extension(self, ext: Extension) -> None:
        """Builds it, or says in one line why not."""
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
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
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildKernels},
    )

"""Maps the repository's folders to packages and builds the C library; everything else stands in pyproject.toml."""

from __future__ import annotations

import os

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

_FOLDER = "ops/econmt_ops/backends/c"

KERNELS = Extension(
    "econmt_ops.backends.c._kernels",
    [f"{_FOLDER}/kernels.c"],
    depends=[
        f"{_FOLDER}/{name}.h"
        for name in ("kernels", "variant", "vnni", "scan_cells", "search", "search_room")
    ],
    libraries=["m"],
    # They come after the flags with which Python itself was built, and the last ones count.
    extra_compile_args=[
        "-O3",
        "-g0",
        "-std=c11",
        "-fopenmp-simd",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-ffp-contract=fast",
        "-fvisibility=hidden",
    ],
    optional=True,
)


class BuildKernels(build_ext):
    """Builds the C library with the compiler that Python was built with, or that of the environment variable CC.

    Without one the package is whole, only slower.
    """

    def build_extension(self, ext: Extension) -> None:
        """Builds it, or says in one line why not."""
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            self.warn(str(error))
            self.warn(
                "econmt is installed without its C library, so training on the CPU will be slower; to build it, "
                "install gcc or set CC, then install econmt again"
            )


setup(
    packages=[
        *find_packages(include=["econmt", "econmt.*", "econmt_runtime"]),
        *find_packages("ops"),
        "econmt._recipes",
    ],
    package_dir={"econmt_ops": "ops/econmt_ops", "econmt._recipes": "recipes"},
    package_data={
        "econmt": ["py.typed"],
        "econmt.memory.report": ["page.html"],
        "econmt.serving": ["page/*"],
        "econmt_ops": ["py.typed"],
        "econmt_ops.backends.c": ["kernels.h"],
        "econmt_ops.backends.cuda": ["*.cu", "*.cuh"],
        "econmt._recipes": ["*.yaml"],
    },
    # Sources that a source distribution holds and an installed package does not need.
    exclude_package_data={"econmt_ops.backends.c": ["*.c", "[!k]*.h"]},
    ext_modules=[KERNELS] if os.name == "posix" else [],
    cmdclass={"build_ext": BuildKernels},
)

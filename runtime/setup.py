"""Builds the C library from the sources of econmt_ops beside this folder; everything else stands in pyproject.toml.

A source distribution does not hold them: what is installed from one uses the library of econmt-ops.
"""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup

OPS = Path(__file__).resolve().parent.parent / "ops"


def library() -> dict[str, Any]:
    """Returns the arguments of setup() that build the library; none where its sources are not."""
    if not (OPS / "setup.py").is_file():
        return {}
    ops = runpy.run_path(str(OPS / "setup.py"))

    class BuildLibrary(ops["BuildKernels"]):  # type: ignore[misc]
        cost = "it translates only with that of econmt-ops"

        def build_extension(self, ext: Extension) -> None:
            """Names the sources only here, because setuptools looks for those of the extension in this folder."""
            named = copy.copy(ext)
            named.sources = sources
            super().build_extension(named)

    extensions = ops["extensions"](f"{OPS}/", "econmt_runtime._kernels")
    sources = [path for each in extensions for path in each.sources]
    for each in extensions:
        each.sources = each.depends = []
    return {"ext_modules": extensions, "cmdclass": {"build_ext": BuildLibrary}}


setup(packages=find_packages(), package_data={"econmt_runtime": ["py.typed", "web/*"]}, **library())

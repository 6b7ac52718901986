"""Maps the folders to packages; everything else stands in pyproject.toml, and the C library in ops/setup.py."""

from __future__ import annotations

import runpy
from itertools import chain
from pathlib import Path

from setuptools import find_packages, setup

DISTRIBUTIONS = ("ops", "memory", "runtime")
"""Folders of packages that have a pyproject.toml of their own and install alone, too."""
OPS = runpy.run_path(str(Path(__file__).resolve().parent / "ops" / "setup.py"))

setup(
    packages=[
        *find_packages(include=["econmt", "econmt.*", "econmt_serve", "econmt_serve.*", "econmt_distill"]),
        *chain.from_iterable(map(find_packages, DISTRIBUTIONS)),
        "econmt._recipes",
    ],
    package_dir={
        "econmt._recipes": "recipes",
        **{f"econmt_{name}": f"{name}/econmt_{name}" for name in DISTRIBUTIONS},
    },
    package_data={
        "econmt": ["py.typed"],
        "econmt_memory": ["py.typed"],
        "econmt_memory.report": ["page.html"],
        "econmt_serve": ["page/*"],
        "econmt._recipes": ["*.yaml"],
        **OPS["PACKAGE_DATA"],
    },
    exclude_package_data=OPS["EXCLUDED_DATA"],
    ext_modules=OPS["extensions"]("ops/"),
    cmdclass={"build_ext": OPS["BuildKernels"]},
)

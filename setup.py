"""Maps the folders to packages; everything else stands in pyproject.toml, and the C library in ops/setup.py."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import find_packages, setup

OPS = runpy.run_path(str(Path(__file__).resolve().parent / "ops" / "setup.py"))

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
        "econmt._recipes": ["*.yaml"],
        **OPS["PACKAGE_DATA"],
    },
    exclude_package_data=OPS["EXCLUDED_DATA"],
    ext_modules=OPS["extensions"]("ops/"),
    cmdclass={"build_ext": OPS["BuildKernels"]},
)

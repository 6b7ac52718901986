"""Maps the repository's folders to packages; everything else about the project stands in pyproject.toml."""

from __future__ import annotations

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["econmt", "econmt.*"]), *find_packages("ops"), "econmt._recipes"],
    package_dir={"econmt_ops": "ops/econmt_ops", "econmt._recipes": "recipes"},
    package_data={
        "econmt": ["py.typed"],
        "econmt.memory": ["page.html"],
        "econmt_ops": ["py.typed"],
        "econmt_ops.*": ["README.md"],
        "econmt._recipes": ["*.yaml"],
    },
)

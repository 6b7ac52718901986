"""Maps the folders to packages; everything else stands in pyproject.toml, and the C library in ops/setup.py."""

from __future__ import annotations

import runpy
from itertools import chain
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.install_lib import install_lib

DISTRIBUTIONS = ("ops", "memory", "runtime")
"""Folders of packages that have a pyproject.toml of their own and install alone, too."""
OPS = runpy.run_path(str(Path(__file__).resolve().parent / "ops" / "setup.py"))


class InstallPackages(install_lib):
    """Installs the packages of DISTRIBUTIONS in a folder that no other distribution has, named by a .pth file.

    If two distributions have the same file, uninstalling either takes it from the other. The folder stands at the end
    of Python's path, so that a package that is installed alone, too, is imported from there.
    """

    def install(self) -> list[str]:
        """Copies what was built, and then moves the packages to their folder."""
        copied: list[str] = super().install()
        site = Path(self.install_dir)
        own = site / "econmt" / "_packages"
        own.mkdir()
        for name in DISTRIBUTIONS:
            (site / f"econmt_{name}").rename(own / f"econmt_{name}")
        (site / "econmt.pth").write_text("econmt/_packages\n", encoding="utf-8")
        return copied


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
        "econmt_memory.report": ["page.html"],
        "econmt_serve": ["page/*"],
        "econmt._recipes": ["*.yaml"],
        **{f"econmt_{name}": ["py.typed"] for name in DISTRIBUTIONS},
        "econmt_runtime": ["py.typed", "web/*"],
        **OPS["PACKAGE_DATA"],
    },
    ext_modules=[Extension(OPS["LIBRARY"], [], depends=["ops/setup.py"], optional=True)],
    cmdclass={"build_ext": OPS["BuildKernels"], "install_lib": InstallPackages},
)

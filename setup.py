"""What `pyproject.toml` cannot say: the root of the checkout is the package `rlhfspec`."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = ("core", "profiles", "policies", "engine", "learning", "actors", "cluster", "integrations")


class BuildPackage(build_py):
    """`setup.py` and `rlhfspec.py` are a checkout's."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of one package; of the root its `__init__.py` alone."""
        found = super().find_package_modules(package, package_dir)
        return [one for one in found if one[:2] == ("rlhfspec", "__init__") or one[0] != "rlhfspec"]


setup(
    package_dir={"rlhfspec": "."},
    packages=["rlhfspec", "rlhfspec.configs"]
    + [f"rlhfspec.{name}" for name in find_packages(include=[f"{folder}*" for folder in FOLDERS])],
    package_data={
        "rlhfspec.configs": ["**/*.yaml"],
        "rlhfspec.integrations": ["their_keys/*.toml"],
        "": ["*.toml", "*.yaml", "*.html", "*.css"],
    },
    exclude_package_data={"rlhfspec": ["*.toml", "*.yaml"]},
    cmdclass={"build_py": BuildPackage},
)

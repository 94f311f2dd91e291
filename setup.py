"""What `pyproject.toml` cannot say: each folder at the top is a package inside `rlhfspec`."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PACKAGE = '"""RLHF on Ray."""\n\n__path__.append(__path__[0] + "/learning/public")\n'
FOLDERS = ("core", "profiles", "policies", "engine", "learning", "actors", "cluster")
PUBLIC = Path("learning/public")
SHORT = {f"rlhfspec.{name}": str(PUBLIC / name.replace(".", "/")) for name in find_packages(str(PUBLIC))}
"Packages of a second, short name. An editable install has no `__path__` of ours and is told their folders."


class BuildPackage(build_py):
    """A wheel has `rlhfspec/__init__.py` where a checkout has `rlhfspec.py`."""

    def run(self) -> None:
        """Build, and add that file, by whose path packages have their short name: no second copy."""
        if not self.editable_mode:
            self.packages = [name for name in self.packages if name not in SHORT]
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "rlhfspec", "__init__.py").write_text(PACKAGE)


setup(
    package_dir={"rlhfspec": ".", **SHORT},
    packages=["rlhfspec.configs", *SHORT]
    + [f"rlhfspec.{name}" for name in find_packages(include=[f"{folder}*" for folder in FOLDERS])],
    package_data={
        "rlhfspec.configs": ["**/*.yaml"],
        "rlhfspec.cluster.kuberay": ["**/*"],
        "": ["*.toml", "*.yaml", "*.html", "*.css"],
    },
    cmdclass={"build_py": BuildPackage},
)

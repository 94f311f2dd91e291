"""What `pyproject.toml` cannot say: each folder at the top is a package inside `rlhfspec`."""

from setuptools import find_packages, setup

FOLDERS = ("core", "profiles", "policies", "engine", "learning", "actors", "cluster")

setup(
    package_dir={"rlhfspec": "."},
    packages=["rlhfspec.configs"]
    + [f"rlhfspec.{name}" for name in find_packages(include=[f"{folder}*" for folder in FOLDERS])],
    package_data={
        "rlhfspec.configs": ["*.yaml"],
        "rlhfspec.cluster.kuberay": ["**/*"],
        "": ["*.toml", "*.yaml"],
    },
)

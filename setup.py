"""What pyproject.toml cannot say: a source distribution has the links of a checkout, such as ag/data -> ../data."""

from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist


class LinkedSdist(sdist):
    """A source distribution whose files lie as in a checkout, so that it passes the same tests."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Fill the folder that is packed."""
        super().make_release_tree(base_dir, files)
        for link in filter(Path.is_symlink, Path("ag").iterdir()):
            (Path(base_dir) / link).symlink_to(link.readlink())


setup(cmdclass={"sdist": LinkedSdist})

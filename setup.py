"""The text of the package's page: the README, whose links lead to files that only a copy of the repository has, without
them. All else is in pyproject.toml.
"""
import re
from pathlib import Path

from setuptools import setup

README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
README = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", README)  # pictures

setup(long_description=re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", README),
      long_description_content_type="text/markdown")

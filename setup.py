"""The text of the package's page: the README, with links that lead from any page. All else is in pyproject.toml."""
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SOURCE = re.search(r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
assert SOURCE is not None, "pyproject.toml: [project.urls] names no Source"
README = (ROOT / "README.md").read_text(encoding="utf-8")
# pictures, not pages that show them
README = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\g<1>{SOURCE[1]}/raw/main/", README)

setup(long_description=re.sub(r"\]\((?!https?:|#|mailto:)", f"]({SOURCE[1]}/blob/main/", README),
      long_description_content_type="text/markdown")

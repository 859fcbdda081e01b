"""The reports and exporters that come with the package."""
import importlib
import pkgutil

from analyzer import report


def load_reports() -> None:
    """Import every file of `report/`; each registers the reports and exporters that it holds."""
    for found in pkgutil.walk_packages(report.__path__, f"{report.__name__}."):
        importlib.import_module(found.name)

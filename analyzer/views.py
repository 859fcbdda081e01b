"""The views of a profile that come with the package, each under the name by which a record asks for it."""
import importlib
import pkgutil

from analyzer import report
from analyzer.api.profile import profile_eagerly
from analyzer.results.profile import Profile
from analyzer.results.verdict import Advice
from analyzer.results.view import register_view


def load_views() -> None:
    """Import every file of `report/`; each registers the views that it holds."""
    for found in pkgutil.walk_packages(report.__path__, f"{report.__name__}."):
        importlib.import_module(found.name)
    register_view.add("advise", _advise_on)
    register_view.add("as_eager", profile_eagerly)


def _advise_on(found: Profile, device: str | None = None) -> Advice:
    """What `Profile.advise` calls; it is imported when it is used first."""
    from analyzer.tools.advice.search import advise_on

    return advise_on(found, device)

"""Which way to train: layouts of a job over a cluster, ranked by steps that are composed of profiled ranks."""
from .layout import Layout
from .one_layout import compose_layout, list_best
from .result import SearchResult

__all__ = ["Layout", "SearchResult", "compose_layout", "list_best"]

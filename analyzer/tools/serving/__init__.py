"""Models behind a server: what requests see, how many are served at once, on how many devices, at what cost."""
from .batch import Batch, Chunk
from .deployment import WEIGHT_FORMATS, Deployment, Layout, stored_format
from .engine import ENGINES, Engine, find_engine, static_share
from .fleet import Fleet, FleetSearch, FleetTarget, find_fleets
from .pass_time import PassTime, PassTimer
from .read_model import read_served_model
from .serve import make_deployment, profile_served
from .served_model import ServedModel
from .served_profile import ServedProfile
from .shared_device import CACHE, GRAPHS, WAKING, WEIGHTS, SharedEngine, refuse_start, share_device
from .simulation import Traffic, simulate

__all__ = ["CACHE", "ENGINES", "GRAPHS", "WAKING", "WEIGHTS", "WEIGHT_FORMATS", "Batch", "Chunk", "Deployment",
           "Engine", "Fleet", "FleetSearch", "Layout", "PassTime", "PassTimer", "ServedModel", "ServedProfile",
           "SharedEngine", "FleetTarget", "Traffic", "find_engine", "find_fleets", "make_deployment", "profile_served",
           "read_served_model", "refuse_start", "share_device", "simulate", "static_share", "stored_format"]

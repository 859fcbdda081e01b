"""What a real run left behind: memory snapshots and errors, told in words."""
from .recording.snapshot import Snapshot, read_snapshot

__all__ = ["Snapshot", "read_snapshot"]

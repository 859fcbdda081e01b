"""Other programs' configurations and command lines: what they ask for, what that costs, what to change in them."""
from .document import JobError
from .read import Job, read_command, read_job

__all__ = ["Job", "JobError", "read_command", "read_job"]

"""What is replaced in torch while there is a world: each family of wrappers has a file of its own."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from analyzer.meta import collective as collective_hook
from analyzer.meta.intercept.replacement import SharedReplacements, Undo

from . import (
    collective,
    dtensor,
    mesh,
    object_collective,
    parameter_group,
    pipeline_stage,
    process_group,
    random_number,
    reducer,
    reduction,
    shard_chunk,
    sharding_cache,
    store,
)
from .c10d_state import make_default_group, process_groups_kept_aside
from .world_spec import WorldSpec


def _replacements() -> Iterator[Undo]:
    for family in (process_group, collective, reduction, mesh, object_collective, reducer, sharding_cache, dtensor,
                   random_number, shard_chunk, parameter_group, pipeline_stage, store):
        yield from family.replacements()


_world_replacements = SharedReplacements(_replacements)


@contextmanager
def simulated_world(spec: WorldSpec, contents: Any, is_initialized: bool) -> Iterator[None]:
    """A block in which torch.distributed is that of ``spec``, or will be when the program initialises it."""
    with ExitStack() as undo:
        undo.enter_context(process_groups_kept_aside())
        undo.enter_context(_world_replacements.installed())
        undo.enter_context(collective_hook.simulating(collective.Collectives(spec.local_size, contents)))
        if is_initialized:
            make_default_group(spec.size, spec.rank)
        yield

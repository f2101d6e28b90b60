"""What a run shall do from now on: the one place where its wishes become what its sidecars are told. Pure.

It is what the CheckpointPolicy says, with the workload's annotations before it: interval and precision themselves, or
what they are to be chosen for, and the bounds. The sidecar with rank 0 chooses, as it measures what a save costs. A
directive is its content: it is given while what is wanted is not what is in force, so nothing of it is remembered. Of
the two timers, interval and steps, 0 turns one off while training runs; both off is no directive, so that nobody
switches saving off from afar.
"""

from __future__ import annotations

import hashlib

from deltashard_proto.v1 import fleet_pb2 as wire
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_operator.api.workload_policy import DIRECTIVE_FIELDS
from deltashard_operator.fleet.report import Directive

TIMERS = ("every_s", "every_steps")
KEPT_FIELDS = ("encoding", "differential")
"""Fields of a policy that a directive leaves as the pod was started with, where they are empty."""


def _explicit_fields(policy: pb.Policy) -> tuple[str, ...]:
    """Fields that a directive with this policy states, zero and empty too: without a timer it states none of them."""
    omitted = KEPT_FIELDS if policy.every_s or policy.every_steps else (*KEPT_FIELDS, *TIMERS)
    return tuple(sorted(DIRECTIVE_FIELDS.difference(omitted)))


def directive_of(policy: pb.Policy) -> Directive:
    """The directive with this policy; the id is a hash of its content."""
    found = wire.Directive(policy=policy, whole=_explicit_fields(policy))
    content = found.SerializeToString(deterministic=True)
    found.id = int.from_bytes(hashlib.sha256(content).digest()[:8], "big") or 1
    return found


def differs(wanted: pb.Policy, in_force: pb.Policy) -> bool:
    """Whether a directive with `wanted` would change anything."""
    names = set(_explicit_fields(wanted)) | {name for name in KEPT_FIELDS if getattr(wanted, name)}
    if wanted.goal:  # a chosen interval is in force, and only began as the policy says
        names -= set(TIMERS)
    if wanted.bits_goal:
        names.discard("encoding")
    return any(getattr(wanted, name) != getattr(in_force, name) for name in names)


def due(wanted: pb.Policy, given: int, in_force: pb.Policy) -> Directive | None:
    """The directive that a pod needs; None: what is in force is what is wanted, or is not known.

    `given`: id of the directive in force in the pod; 0: none, and `in_force` counts, the policy in force in the run.
    """
    if not given and (not in_force.encoding or not differs(wanted, in_force)):
        return None
    found = directive_of(wanted)
    return found if found.id != given else None

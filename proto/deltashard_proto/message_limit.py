"""Size limit of gRPC messages between trainer and sidecar, for both ends.

Messages carry no tensor bytes. The largest field is the layout of many ranks in an Open, with 32 bytes per box. The
limit allows 33 million boxes; 64 MiB allowed two million. The format admits three times more, which exceeds one message
(protobuf's limit is 2 GiB).
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 1 << 30
MAX_LAYOUT_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""Limit of the layout in an Open; the other fields are small."""
MESSAGE_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
"""gRPC options of a channel or server."""

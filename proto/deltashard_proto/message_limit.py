"""How large a gRPC message between trainer and sidecar may be: one number for both ends.

Tensor bytes never travel in one. What is large is the layout of many ranks, a field of an Open: 32 bytes a box. At
64 MiB, which was the limit once, two million boxes fit; now 33 million do. The format admits three times more, which no
one message could hold (protobuf ends at 2 GiB).
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 1 << 30
MAX_LAYOUT_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""Of the layout in an Open; the rest of it is small."""
MESSAGE_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
"""Of a channel or server."""

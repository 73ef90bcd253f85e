"""Every bound of the service, with its unit in the name and its reason beside it."""

from typing import Final

TILE_TOKENS: Final = 16
"""KDA's state advances in whole tiles: 16 tokens keep 2^-G representable for a gate bounded by -5."""
PAGE_TOKENS: Final = 64
"""MLA latents are kept, shared and stored by whole pages."""
SPLIT_TOKENS: Final = 512
"""MLA attention is cut at absolute multiples of this, so that its bits do not depend on the batch."""
NORM_ROWS: Final = 2
"""Final-norm rows kept a slot: the engine runs at most one step ahead of the log."""

DIGEST_BYTES: Final = 32
"""BLAKE3 and BLAKE2b-256."""

CHECKPOINT_EVERY_TOKENS_DEFAULT: Final = 512
"""About a quarter of a second of replay of the tiny model on two cores."""
CHECKPOINTS_KEPT_DEFAULT: Final = 3
CHECKPOINTS_KEPT_MIN: Final = 2
"""A session's newest checkpoints that stay: should the newest be damaged, there is the one before it."""
CHECKPOINTS_KEPT_MAX: Final = 1000
LADDER_STEP_TOKENS_DEFAULT: Final = 4096
"""Of the older ones, one every so many tokens and ever fewer further back: a fork from the past replays about as far as
it lies behind the head."""
LADDER_STEP_TOKENS_MAX: Final = 1_048_576
GC_INTERVAL_SECONDS_DEFAULT: Final = 300
GC_GRACE_SECONDS_DEFAULT: Final = 600
"""A blob that no manifest names is left alone for so long, on the collector's own clock: it may be part of a checkpoint
that is being written, which would have to store it again."""
GC_SECONDS_MAX: Final = 30 * 24 * 3600
COLLECTOR_TTL_SECONDS: Final = 20.0
"""A collector whose counter stands still for so long, on the observer's own clock, is taken for dead."""
COLLECTOR_RENEW_SECONDS: Final = 5.0
PREFILL_CHUNK_TOKENS_DEFAULT: Final = 512
"""Prompt tokens a step may consume beside the decoding sessions: bounds the gap between two decoded tokens."""

MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""gRPC's own default; larger inputs use UploadAppend or Import, which stream."""
APPEND_TEXT_BYTES_MAX: Final = 1024 * 1024
"""Text of one unary Append or Generate: its answer holds the token ids, which must fit one message as well."""
INPUT_TOKENS_MAX: Final = 1_048_576
"""One append: the largest context of the models served."""
TEXT_BYTES_MAX: Final = 16 * 1024 * 1024
"""One streamed append's text: sixteen bytes a token of the largest context."""
FORK_CHILDREN_MAX: Final = 1024
"""Children of one Fork call: one transaction must stay small."""
GENERATE_TOKENS_MAX: Final = 1_048_576
"""Tokens of one Generate call."""
STOP_STRINGS_MAX: Final = 16
STOP_STRING_BYTES_MAX: Final = 256
"""Stop strings are searched at every step, so their number and length are bounded."""
REQUEST_ID_BYTES_MAX: Final = 128
REQUEST_ID_KEEP_SECONDS: Final = 24 * 3600
"""How long the answer to a request id is kept."""
PAGE_BYTES_MAX: Final = 2 * 1024 * 1024
"""A list call cuts its page here, whatever the page size asked for: a message must hold it."""
LABELS_MAX: Final = 64
LABEL_BYTES_MAX: Final = 256
ENCODE_HERE_BYTES: Final = 16 * 1024
"""Text that is made token ids of on the event loop: about 5 ms of its time. Longer text goes to a thread."""
CHAT_NAME_BYTES_MAX: Final = 256
"""Name of a speaker or tool in a chat: a name, not a text."""
PAGE_SIZE_DEFAULT: Final = 100
PAGE_SIZE_MAX: Final = 1000
"""List calls."""
SESSION_QUEUE_MAX: Final = 4096
"""Calls that may wait for a slot on one node."""

STREAM_BUFFER_TOKENS: Final = 256
"""A stream reads the log through a cursor; this much is kept for a slow reader before it re-reads."""
HEARTBEAT_SECONDS: Final = 10.0
STREAM_AGE_SECONDS_DEFAULT: Final = 3600
"""A generation or a follower that is answered for so long is opened again: so that readers spread over nodes and load
balancers that came since, and none depends on a connection that lasts for ever."""
STREAM_AGE_JITTER: Final = 0.1
"""Share by which a stream's age differs at most, so that streams begun together do not come back together."""
LEASE_RENEW_SECONDS: Final = 1.0
LEASE_TTL_SECONDS: Final = 3.0
"""A lease whose counter stands still for this long, on the observer's own clock, is expired."""
LEASE_SKEW_SECONDS: Final = 0.5
STALL_SECONDS_DEFAULT: Final = 60
"""A step, a call of the engine or a turn of the event loop that takes longer costs a node its lease: far above what a
step takes, for a node that is taken for stalled loses all its sessions."""
TAKEOVERS_MAX: Final = 3
"""So many owners of a session in a row, lost without a token of progress: another node lets it be."""
TAKEOVERS_ALONE_MAX: Final = 10
"""The same where the last owner was an earlier process of the same node: what ends a node's processes one after the
other is rather the node's own fault than that of each of its sessions."""
PEER_CONNECT_SECONDS: Final = 2.0
"""To open a connection to another node, before it counts as out of reach."""
PEER_IDLE_SECONDS: Final = 60.0
"""A connection to another node that nobody used for so long is closed."""
FORWARD_SECONDS_MAX: Final = 10.0
"""A call that no node answers is tried for so long: longer than until a dead node's sessions are taken over."""
FORWARD_BACKOFF_SECONDS: Final = 0.02
FORWARD_BACKOFF_SECONDS_MAX: Final = 0.5
"""Between two tries: doubles from the first to the most."""
SHUTDOWN_SECONDS: Final = 10.0
"""SIGTERM to exit."""

PEER_FRAME_BYTES_MAX: Final = 1024 * 1024
"""A blob goes from node to node in pieces of this size, so that calls on the same connection get their turn."""
PEER_BLOB_BYTES_MAX: Final = 256 * 1024 * 1024 + 4096
"""A blob of a peer is taken into memory up to this: the largest blob there is, with its header."""
PEER_ASK_DIGESTS_MAX: Final = 4096
"""Digests of one question to a peer: 140 KB."""

STANDBYS_MAX: Final = 8
"""Nodes that follow one session: each of them does all of its work."""
MOVE_WAIT_SECONDS: Final = 0.5
"""So long a call waits for a session that is about to leave for another node; then its caller comes again."""
CUT_OVER_SECONDS: Final = 0.4
"""How long a session stands still until its target is asked no more: within that its callers do not notice."""
MOVE_STALL_SECONDS: Final = 60.0
"""A move whose target gets no further for so long has failed: the longest restore takes less."""
MOVE_LAG_TOKENS: Final = 16
"""Tokens that a target may be behind when the session is handed over: a step of one tile takes about as long as a step
of one token."""

assert PAGE_TOKENS % TILE_TOKENS == 0
assert SPLIT_TOKENS % PAGE_TOKENS == 0
assert CHECKPOINT_EVERY_TOKENS_DEFAULT % TILE_TOKENS == 0
assert 2 * PAGE_BYTES_MAX <= MESSAGE_BYTES_MAX
assert 2 * PEER_FRAME_BYTES_MAX <= MESSAGE_BYTES_MAX
assert 40 * PEER_ASK_DIGESTS_MAX < MESSAGE_BYTES_MAX
assert 3 * max(APPEND_TEXT_BYTES_MAX, INPUT_TOKENS_MAX) < MESSAGE_BYTES_MAX, "an id below 2^21 is three bytes"
assert CHECKPOINTS_KEPT_MIN <= CHECKPOINTS_KEPT_DEFAULT <= CHECKPOINTS_KEPT_MAX
assert LADDER_STEP_TOKENS_DEFAULT % TILE_TOKENS == 0
assert COLLECTOR_TTL_SECONDS >= 3 * COLLECTOR_RENEW_SECONDS
assert TAKEOVERS_MAX < TAKEOVERS_ALONE_MAX
assert CUT_OVER_SECONDS < MOVE_WAIT_SECONDS
assert LEASE_TTL_SECONDS >= 3 * LEASE_RENEW_SECONDS
assert FORWARD_SECONDS_MAX > 2 * (LEASE_TTL_SECONDS + LEASE_SKEW_SECONDS)
assert STREAM_BUFFER_TOKENS > 0
assert 0 <= STREAM_AGE_JITTER < 1

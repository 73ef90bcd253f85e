"""What must happen in one step on the server for a blob to appear, to be confirmed, and to go."""

from typing import Final

STORE: Final = """
local size = 0
for i = 2, #KEYS do size = size + redis.call('STRLEN', KEYS[i]) end
if size ~= tonumber(ARGV[2]) then return {'LOST'} end
local old = redis.call('GET', KEYS[1]) or ''
if old ~= '' and ARGV[3] ~= 'any' and old ~= ARGV[4] then return {'KEPT', old} end
for i = 2, #KEYS do redis.call('PERSIST', KEYS[i]) end
redis.call('SET', KEYS[1], ARGV[1])
return {'STORED', old}
"""
"""KEYS: header, chunks. ARGV: new header, frame bytes, 'any' to replace whatever is there, else the one header that may
be replaced ('' for none). Chunks that are not all there any more make no blob; those that are stop expiring."""

TOUCH: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
return 1
"""
"""KEYS: header. ARGV: what it is. A write that changes nothing, so that replicas can confirm what another one wrote."""

DELETE: Final = """
local least = tonumber(redis.call('GET', KEYS[2]) or '0')
if tonumber(ARGV[1]) < least then return {'STALE', least} end
local old = redis.call('GET', KEYS[1]) or ''
redis.call('DEL', KEYS[1])
return {'GONE', old}
"""
"""KEYS: header, fence of its group. ARGV: the collector's term."""

FENCE: Final = """
local least = tonumber(redis.call('GET', KEYS[1]) or '0')
if tonumber(ARGV[1]) > least then redis.call('SET', KEYS[1], ARGV[1]) end
return least
"""
"""KEYS: fence of a group. ARGV: the least term from now on."""

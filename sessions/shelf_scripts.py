"""What is done with a shelved stream in one step, as Lua that Valkey runs.

Keys: the stream, its journal, the conversation's name. The answers of those that write: TAKEN the stream is another replica's,
STOPPED_ELSEWHERE it was stopped at one, THERE it is there now, NOT_THERE it is not there as the writer knows it, who writes all
of it again.
"""

from __future__ import annotations

NOT_THERE, TAKEN, THERE, STOPPED_ELSEWHERE = -1, 0, 1, 2
# Number of a stream that was stopped: nobody writes or takes it any more.
STOPPED = 1 << 40

_NOT_OWN = f"if number > own then return number >= {STOPPED} and {STOPPED_ELSEWHERE} or {TAKEN} end"

# What a stream is about, and the state it is in from now on: one whose very end is there is done, and stays as it is.
_STOP_ONE = f"""
local function stopped(stream)
  local about, journal = redis.call('HGET', stream, 'about'), stream .. ':journal'
  if not about then return redis.call('HGET', stream, 'stopped'), 'stopped' end
  if string.find(redis.call('GETRANGE', journal, -64, -1), '"closed"', 1, true) then return about, 'done' end
  redis.call('HSET', stream, 'number', '{STOPPED}', 'stopped', about)
  redis.call('HDEL', stream, 'about', 'body')
  redis.call('DEL', journal)
  return about, 'stopped'
end
"""
# Who writes again (ARGV[6]) does not take the name from a later stream, which may have been written again before. A new turn is
# the end of the conversation's former one.
PUT = f"""{_STOP_ONE}
local number, own = tonumber(redis.call('HGET', KEYS[1], 'number') or '0'), tonumber(ARGV[1])
{_NOT_OWN}
if number < own then
  local now = redis.call('TIME')
  local at = string.format('%.3f', now[1] + now[2] / 1000000 - tonumber(ARGV[8]))
  redis.call('HSET', KEYS[1], 'about', ARGV[3], 'body', ARGV[4], 'number', ARGV[1], 'at', at)
  redis.call('DEL', KEYS[2])
  local last = KEYS[3] and redis.call('GET', KEYS[3])
  local other = ARGV[6] == '1' and last and redis.call('HGET', ARGV[7] .. last, 'about')
  if KEYS[3] and not (other and cjson.decode(other).created_at > cjson.decode(ARGV[3]).created_at) then
    redis.call('SET', KEYS[3], ARGV[5], 'EX', ARGV[2])
    if last and last ~= ARGV[5] and ARGV[6] == '0' then stopped(ARGV[7] .. last) end
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return {THERE}
"""
# Lines that belong at a place of the journal; some of them may be there already. At 0 they are all that there is.
ADD = f"""
local number, own = tonumber(redis.call('HGET', KEYS[1], 'number') or '0'), tonumber(ARGV[1])
{_NOT_OWN}
if number < own then return {NOT_THERE} end
local place, lines = tonumber(ARGV[3]), ARGV[4]
local there = redis.call('GETRANGE', KEYS[2], place, -1)
local both = math.min(#there, #lines)
if redis.call('STRLEN', KEYS[2]) < place or string.sub(there, 1, both) ~= string.sub(lines, 1, both) then
  if place > 0 then return {NOT_THERE} end
  redis.call('SET', KEYS[2], lines)
elseif #lines > both then
  redis.call('APPEND', KEYS[2], string.sub(lines, both + 1))
end
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[2]) end
return {THERE}
"""
# By who has it.
FORGET = f"""
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'number', '{STOPPED}')
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""
# By anybody: the stream with this id (ARGV[2]), else the last one of the conversation, whose name's key is the only one.
STOP = f"""{_STOP_ONE}
local about, state
if ARGV[2] ~= '' then about, state = stopped(ARGV[1] .. ARGV[2]) end
local last = not about and redis.call('GET', KEYS[1])
if last then about, state = stopped(ARGV[1] .. last) end
return about and {{about, state}}
"""
# Not after the time (Valkey's own) until which somebody waits for it: nobody would read the stream then. How long ago its request
# came, the same clock tells: those of the replicas may differ.
TAKE = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
if now > tonumber(ARGV[1]) or redis.call('HEXISTS', KEYS[1], 'about') == 0 then return false end
local number, at = redis.call('HINCRBY', KEYS[1], 'number', 1), redis.call('HGET', KEYS[1], 'at')
local age = at and string.format('%.3f', now - tonumber(at)) or ''
return {number, redis.call('HGET', KEYS[1], 'about'), redis.call('HGET', KEYS[1], 'body'), redis.call('GET', KEYS[2]) or '', age}
"""

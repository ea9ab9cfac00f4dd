"""Programs of an attacker on the same machine, for `strangers.as_stranger`. They do not import this project."""

from __future__ import annotations

#: argv[1], JSON: {"tcp": [[host, port]], "stream": [name], "datagram": [name], "pids": [pid], "shm": [path],
#: "address": int}, an abstract name with an @ in front. Prints {"heard": hex of all that was answered, "got": what
#: should have been refused}.
EVERY_DOOR = r"""
aim = json.loads(sys.argv[1])
heard, got = bytearray(), []

def frame(payload):
    return struct.pack("<I", len(payload)) + payload

def packed(tag, **fields):
    # msgpack, by hand: a map of short strings to 16 bytes each
    body = bytes([0x81 + len(fields)]) + b"\xa4type" + bytes([0xa0 + len(tag)]) + tag.encode()
    for name, value in fields.items():
        body += bytes([0xa0 + len(name)]) + name.encode() + b"\xc4" + bytes([len(value)]) + value
    return body

said = [
    frame(packed("card")),
    frame(packed("begin", lease=os.urandom(16), digest=os.urandom(16))),
    frame(packed("release", lease=os.urandom(16))) * 50,
    frame(b"garbage"),
    struct.pack("<I", 0xffffffff) + bytes(100_000),
    struct.pack("<I", 1000) + b"half a frame",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(508),
    struct.pack("<QQQ", 0, 1, 2) * 40,
    os.urandom(65536),
    b"GET / HTTP/1.0\r\n\r\n",
    b"",
]

def open_door(door):
    if isinstance(door, list):
        return socket.create_connection(tuple(door), timeout=5)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    connection.connect("\0" + door[1:] if door.startswith("@") else door)
    return connection

for door in aim["tcp"] + aim["stream"]:
    for words in said:
        try:
            with open_door(door) as connection:
                connection.sendall(words)
                connection.settimeout(0.05)
                while part := connection.recv(65536):
                    heard += part[:4096]
                    if len(heard) > 1 << 22:
                        break
        except OSError:
            pass

for door in aim["datagram"]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.setblocking(False)
        for _ in range(300):
            try:
                connection.sendto(os.urandom(random.randrange(1, 200)), "\0" + door[1:] if door[0] == "@" else door)
            except OSError:
                pass

# Hundreds of connections that say nothing.
held = []
for door in aim["stream"]:
    for _ in range(300):
        try:
            held.append(open_door(door))
        except OSError:
            pass
time.sleep(0.5)
for connection in held:
    connection.setblocking(False)
    try:
        heard += connection.recv(4096)
    except OSError:
        pass

class iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]

libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(4096)
for pid in aim["pids"]:
    mine, theirs = iovec(ctypes.addressof(buffer), 4096), iovec(aim["address"], 4096)
    for call in (libc.process_vm_readv, libc.process_vm_writev):
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        if call(pid, ctypes.byref(mine), one, ctypes.byref(theirs), one, none) > 0:
            got.append(f"{call.__name__} of {pid}")
    if libc.ptrace(16, pid, 0, 0) == 0:
        got.append(f"ptrace of {pid}")
    for path in [f"/proc/{pid}/mem", f"/proc/{pid}/environ", *(f"/proc/{pid}/fd/{fd}" for fd in range(100))]:
        try:
            os.close(os.open(path, os.O_RDONLY))
            got.append(path)
        except OSError:
            pass
    try:
        os.kill(pid, 0)
        got.append(f"kill of {pid}")
    except OSError:
        pass

for path in aim["shm"]:
    for mode in (os.O_RDONLY, os.O_RDWR):
        try:
            os.close(os.open(path, mode))
            got.append(path)
        except OSError:
            pass

print(json.dumps({"heard": bytes(heard).hex(), "got": got, "held": len(held)}))
"""

#: argv[1], JSON: {"name": of the peer, "metadata": hex, "base": int, "bytes": int}: all that a card says. Prints what
#: NIXL let it read, and whether it let it write.
NIXL_WITH_A_STOLEN_CARD = r"""
import numpy as np
from nixl_cu13 import _api
aim = json.loads(sys.argv[1])
result = {"read": "", "wrote": False, "why": []}
try:
    agent = _api.nixl_agent("stranger", _api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": os.environ["ERROR_MODE"]})
    mine = np.zeros(aim["bytes"], np.uint8)
    agent.register_memory([(mine.ctypes.data, mine.nbytes, 0, "")], "DRAM")
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", [(mine.ctypes.data, mine.nbytes, 0)], "DRAM")
    agent.add_remote_agent(bytes.fromhex(aim["metadata"]))
    for operation in ("READ", "WRITE"):
        remote = agent.prep_xfer_dlist(aim["name"], [(aim["base"], mine.nbytes, 0)], "DRAM")
        handle = agent.make_prepped_xfer(operation, local, [0], remote, [0])
        state, end = agent.transfer(handle), time.monotonic() + 3
        while state == "PROC" and time.monotonic() < end:
            time.sleep(0.001)
            state = agent.check_xfer_state(handle)
        if operation == "READ" and state == "DONE":
            result["read"] = mine[:64].tobytes().hex()
        if operation == "WRITE" and state == "DONE":
            result["wrote"] = True
        result["why"].append(state)
        mine[:] = 0xff
except Exception as error:
    result["why"].append(f"{type(error).__name__}: {error}")
print(json.dumps(result), flush=True)
os._exit(0)
"""

#: argv[1], JSON: {"pid": int, "fd": int}, what a card of shared memory says. Prints the pool's first bytes.
MAP_A_STOLEN_FILE = r"""
aim = json.loads(sys.argv[1])
read = ""
for flags, access in ((os.O_RDONLY, mmap.ACCESS_READ), (os.O_RDWR, mmap.ACCESS_WRITE)):
    try:
        with mmap.mmap(os.open(f"/proc/{aim['pid']}/fd/{aim['fd']}", flags), 4096, access=access) as memory:
            read += memory[:64].hex()
    except OSError:
        pass
print(json.dumps({"read": read}))
"""

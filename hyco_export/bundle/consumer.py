"""The device's half of HyCo in one file, to port from; BUNDLE.md says the same in words, chapter by chapter.

    python consumer.py BUNDLE                                            every golden vector; exit code 1 if one fails, 2: no bundle
    python consumer.py BUNDLE --server URL --prompt TEXT [--prompt TEXT ...]              a conversation with a server

Needs Python 3.11, numpy, onnxruntime; `tokenizers` for text (else --ids 2,105,...), onnxruntime-qnn for --backend qnn.
"""

# ruff: noqa: E401, E501, E701, I001, RUF017
# fmt: off
import argparse, hashlib, http.client, io, json, pathlib, struct, sys, urllib.parse
import numpy as np, onnxruntime as ort

ROOT, EMPTY, PADDING = -1, -1, 0  # parent of a child of the root; position of an empty slot; token of a padding row
PROVIDER = "QNNExecutionProvider"
PARTS = {"cases", "chat", "drafting", "files", "graphs", "head", "server", "sessions", "slm", "slm_bridge", "target", "tolerance"}  # of bundle.json
BRIDGED = "this bundle's SLM has a vocabulary of its own, which this file does not read: take driver.pyz"
# MessagePack's codes: of numbers; of what has a count, with the count's bytes; and by type of short ones, with how many there are
NUMBERS = dict(zip((0xCA, 0xCB, *range(0xCC, 0xD4)), (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), strict=True))
COUNTED: dict = {0xC4: (bytes, 1), 0xC5: (bytes, 2), 0xC6: (bytes, 4), 0xD9: (str, 1), 0xDA: (str, 2), 0xDB: (str, 4), 0xDC: (list, 2), 0xDD: (list, 4)}
SHORT: dict = {str: (0xA0, 32), bytes: (0, 0), list: (0x90, 16)}

def pack(value):  # MessagePack bytes, the fewest, of booleans, integers >= -32, floats, texts, bytes and lists
    if isinstance(value, bool): return b"\xc3" if value else b"\xc2"
    if isinstance(value, float): return struct.pack(">Bd", 0xCB, value)
    if isinstance(value, int):
        if value < 128: return struct.pack("b", value)
        code = next(code for code in range(0xCC, 0xD0) if value < 256 ** struct.calcsize(NUMBERS[code]))
        return bytes([code]) + struct.pack(NUMBERS[code], value)
    body = b"".join(map(pack, value)) if isinstance(value, list) else value.encode() if isinstance(value, str) else value
    count, (first, many) = len(value if isinstance(value, list) else body), SHORT[type(value)]
    if count < many: return bytes([first + count]) + body
    code, size = next((code, size) for code, (kind, size) in COUNTED.items() if kind is type(value) and count < 256**size)
    return bytes([code]) + count.to_bytes(size, "big") + body
def unpack(stream):  # the next value of a stream of MessagePack bytes; no maps
    code = (head := stream.read(1))[0]
    if code < 0x80 or code >= 0xE0: return struct.unpack("b", head)[0]
    if code in (0xC0, 0xC2, 0xC3): return {0xC0: None, 0xC2: False, 0xC3: True}[code]
    if code in NUMBERS: return struct.unpack(NUMBERS[code], stream.read(struct.calcsize(NUMBERS[code])))[0]
    kind, count = (list, code & 15) if code < 0xA0 else (str, code & 31)
    kind, size = COUNTED.get(code, (kind, 0))
    count = int.from_bytes(stream.read(size), "big") if size else count
    if kind is list: return [unpack(stream) for _ in range(count)]
    return stream.read(count).decode() if kind is str else stream.read(count)

def open_bundle(root):  # bundle.json, after every file was compared with the sha256 that it states; exit code 2 where that fails
    path = root / "bundle.json"
    try:
        if not (facts := json.loads(path.read_bytes())).keys() >= PARTS: raise ValueError
        for path, record in [(root / name, record) for name, record in facts["files"].items()]:
            if hashlib.file_digest(path.open("rb"), "sha256").hexdigest() != record["sha256"]: raise ValueError
    except Exception as error:  # a damaged bundle.json may hold anything
        problem = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else "is not the file that was built"
        argparse.ArgumentParser().exit(2, f"{path} {problem}: give a bundle's folder, or copy the bundle again\n")
    return facts

def read_tensors(path):  # arrays by name, and metadata, of a safetensors file; mapped, not read
    raw, kinds = np.memmap(path, np.uint8, "r"), {"F32": "<f4", "I32": "<i4", "I8": "i1", "U8": "u1", "U16": "<u2"}
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    header = json.loads(raw[8:start].tobytes())
    metadata, data = header.pop("__metadata__", {}), raw[start:]
    return {name: data[slice(*one["data_offsets"])].view(kinds[one["dtype"]]).reshape(one["shape"]) for name, one in header.items()}, metadata

def quantised(graph, real):  # integers of these inputs, of those that the graph has: round half to even, add the zero point, clip
    def levels(spec, values):
        limits = np.iinfo(spec["dtype"])
        return np.clip(np.rint(np.asarray(values, np.float64) / spec["scale"]) + spec["zero_point"], limits.min, limits.max).astype(spec["dtype"])
    return {name: levels(graph.inputs[name], values) for name, values in real.items() if name in graph.inputs}
def held(first, length, capacity):  # position in each slot of a ring after first ... length - 1 were written; position p is in slot p mod capacity
    return np.where((positions := length - 1 - (length - 1 - np.arange(capacity)) % capacity) < first, EMPTY, positions)
def sees(queries, keys, span):  # bool [R, C]: the key exists, is not after the query, and is one of the `span` newest, the query counted
    distance = queries[:, None] - keys[None, :]
    return (keys[None, :] != EMPTY) & (distance >= 0) & (distance < (span or 1 << 40))
def host_inputs(facts, kind, positions, seen):  # real mask [R, ...], cos, sin float32 [R, d] of a layer type
    angles = positions.astype(np.float32)[:, None] * np.asarray(facts["inv_freq"][kind], np.float32)[None, :]
    cos, sin = np.tile(np.cos(angles), 2), np.concatenate([-np.sin(angles), np.sin(angles)], axis=1)  # the sign of rotate-half
    return {f"mask.{kind}": np.where(seen, 0.0, facts["mask_value"]), f"cos.{kind}": cos, f"sin.{kind}": sin}

class Graph:  # one graph: integers in, integers out, by name
    def __init__(self, root, facts, name, backend, threads):
        self.name, graph, options = name, facts["graphs"][name], ort.SessionOptions()
        self.inputs, self.outputs = ({spec["name"]: spec for spec in graph[side]} for side in ("inputs", "outputs"))
        path = root / graph["model" if backend == "qnn" else "integer_graph"]
        if backend == "qnn":  # the context binary, on the NPU or in the x86 emulator; nothing may fall back to the CPU
            import onnxruntime_qnn as qnn
            if PROVIDER not in [one.ep_name for one in ort.get_ep_devices()]: ort.register_execution_provider_library(PROVIDER, qnn.get_library_path())
            devices = [one for one in ort.get_ep_devices() if one.ep_name == PROVIDER]
            npus = [one for one in devices if one.device.type == ort.OrtHardwareDeviceType.NPU]
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            settings = {key: str(facts["target"][key]) for key in ("htp_arch", "soc_model", "vtcm_mb")} | {"offload_graph_io_quantization": "0"}
            options.add_provider_for_devices(npus or devices, settings | {"backend_path": qnn.get_qnn_htp_path()})
        else:  # the integer graph exactly as written: with optimisations on, 4-bit products are computed otherwise
            options.graph_optimization_level, options.intra_op_num_threads = ort.GraphOptimizationLevel.ORT_DISABLE_ALL, threads
        self.session = ort.InferenceSession(str(path), options, providers=None if backend == "qnn" else ["CPUExecutionProvider"])
    def run(self, feeds): return dict(zip(self.outputs, self.session.run(list(self.outputs), feeds), strict=True))

def empty_rings(graph):  # K and V by input name, [N, W, d]; empty slots hold the zero point, which is 0.0
    rings = (spec for name, spec in graph.inputs.items() if name[:2] in ("k.", "v."))
    return {spec["name"]: np.full(spec["shape"], spec["zero_point"], spec["dtype"]) for spec in rings}
def write(ring, first, rows): ring[:, np.arange(first, first + rows.shape[1]) % ring.shape[1]] = rows  # [N, n, d] of positions first ...

class Head:  # the MTP head: takes hand-offs, drafts a chain
    def __init__(self, root, facts, graph):
        self.facts, self.graph, self.kept = facts["head"], graph, read_tensors(root / facts["keepset"])[0]["ids"]
        kv = self.facts["handoff"]["kv"]  # a row is K then V of the sliding layer, then of the full one, head by head
        self.row = [(f"{part}.{kind}", kv[kind]["heads"], kv[kind]["dim"]) for kind in ("sliding", "full") for part in "kv"]
    def take(self, handoff, root, begin=False):  # a reply's e, h and K/V rows; `root` is the position of the new root. `begin`: PRIME's reply
        if begin: self.rings, self.oldest = empty_rings(self.graph), handoff[3]
        e, h, kv, first, older, older_first = handoff + [b"", 0][len(handoff) - 4 :]
        self.e, self.h = (np.frombuffer(row, np.uint8)[None] for row in (e, h))
        widths = [heads * dim for _, heads, dim in self.row]
        if first + len(kv) // sum(widths) != root: sys.exit(f"the hand-off's rows do not end at position {root - 1}")
        if older: self.oldest = older_first  # a late part of the first window; rows that have left the window meanwhile are dropped
        for payload, start, dropped in ((kv, first, 0), (older, older_first, max(0, root - self.facts["handoff"]["window"] - older_first))):
            table = np.frombuffer(payload, np.uint8).reshape(-1, sum(widths))[dropped:]
            for (name, heads, dim), block in zip(self.row, np.split(table, np.cumsum(widths)[:-1], axis=1), strict=True):
                write(self.rings[name], start + dropped, block.reshape(-1, heads, dim).transpose(1, 0, 2))
    def draft(self, root):  # verifier ids: the chain, and the runner-ups of its first steps
        query, slots, feeds = np.array([root]), held(self.oldest, root, self.facts["handoff"]["window"]), {"e": self.e, "h": self.h, **self.rings}
        for kind, span in self.facts["spans"].items(): feeds |= quantised(self.graph, host_inputs(self.facts, kind, query, sees(query, slots, span)))
        rows = self.graph.run(feeds)
        return self.kept[rows["chain"]].tolist(), self.kept[rows.get("runner_up", [])].tolist()

class Slm:  # the small language model over its rings; they hold the positions first ... length - 1
    def __init__(self, root, facts, graphs):
        self.facts, self.tree, self.prefill_graph = facts["slm"], graphs["slm_tree"], graphs["slm_prefill"]
        self.tables, metadata = read_tensors(root / facts["slm_tables"])
        self.layouts, self.sink = json.loads(metadata["layout"]), read_tensors(root / facts["slm_sink"])[0] if facts["slm_sink"] else {}
    def _embed(self, name, ids):  # float32 [n, D]: integer x scale of its part of the row x factor; the lowest bits of a byte come first
        bits, width, factor = (self.layouts[name][key] for key in ("bits", "width", "factor"))
        packed, scales = self.tables[name][ids], self.tables[f"{name}.scale"][ids]
        if bits < 8:
            packed = packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & (1 << bits) - 1
            packed = packed.reshape(len(ids), -1).astype(np.int8) - (1 << bits - 1)
        return packed.view(np.int8)[:, :width].astype(np.float32) * np.repeat(scales, width // scales.shape[1], axis=1) * np.float32(factor)
    def run(self, graph, tokens, parents):
        rows = graph.inputs["embeds"]["shape"][0]
        ids = np.array([*tokens, *[PADDING] * (rows - len(tokens))])
        own, depth = np.eye(rows, dtype=bool), np.zeros(rows, np.int64)  # own: the row and its ancestors in this pass
        for row, parent in enumerate(parents):
            if parent != ROOT: own[row], depth[row] = own[row] | own[parent], depth[parent] + 1
        positions = self.length + depth
        real = {name: self._embed(table, ids) for name, table in (("embeds", "tokens"), ("per_layer", "per_layer")) if table in self.layouts}
        for kind, capacity in self.facts["rings"].items():
            in_ring = sees(positions, held(self.first, self.length, capacity), self.facts["spans"][kind])
            in_ring[len(tokens) :] = False  # a padding row sees itself alone
            seen = np.concatenate([in_ring, own & sees(positions, positions, self.facts["spans"][kind])], axis=1)
            real |= host_inputs(self.facts, kind, positions, seen)
        return graph.run({**{name: ring for name, ring in self.rings.items() if name in graph.inputs}, **quantised(graph, real)})
    def begin(self, ids):  # prefill what the largest ring holds of the ids before the root; positions stay absolute
        self.rings = empty_rings(self.tree)
        self.first = self.length = max(0, len(ids) - 1 - max(self.facts["rings"].values()))
        self.prefill(ids[self.first : -1])
    def prefill(self, tokens):
        if self.sink and self.length == 0 and tokens and tokens[0] == self.facts["opening_token"]:
            for name, rows in self.sink.items(): write(self.rings[name], 0, rows)  # stored: the opening token is never run
            self.length, tokens = 1, tokens[1:]
        for start in range(0, len(tokens), self.facts["prefill_rows"]):
            part = tokens[start : start + self.facts["prefill_rows"]]
            self.commit(self.run(self.prefill_graph, part, range(ROOT, len(part) - 1)), list(range(len(part))))
    def commit(self, outputs, rows):  # copy the new K/V of these rows, a path in depth order, behind the newest position
        for name in self.rings: write(self.rings[name], self.length, outputs[name.replace(".", "_new.")][:, rows])
        self.length += len(rows)

def best_children(levels, scale, count):  # (column, log q) of the `count` likeliest of logits uint16 [C], best first, of equals the smaller column
    count = min(count, len(levels))
    columns = np.flatnonzero(levels >= np.partition(levels, -count)[-count])  # integers stand in the logits' order
    columns = columns[np.argsort(-levels[columns].astype(np.int64), kind="stable")][:count]
    shifted = levels.astype(np.float32) - np.float32(levels.max())
    norm = np.log(np.exp(shifted * np.float32(scale)).sum(dtype=np.float64))
    return [(int(column), float(shifted[column] * scale - norm)) for column in columns]

class Drafter:  # one round's tree; a node is [token, parent, score, depth]
    def __init__(self, root, facts, graphs):
        self.rule, self.stops = facts["drafting"], set(facts["stop_ids"])
        self.head, self.slm = Head(root, facts, graphs["head"]), Slm(root, facts, graphs)
    def propose(self, ids):
        edge, capacity, (chain, runners) = self.rule["edge_log_prob"], self.slm.facts["rows"], self.head.draft(len(ids) - 1)
        length = next((step + 1 for step, token in enumerate(chain) if token in self.stops), len(chain))  # nothing stands below a stop
        nodes = [[token, step - 1, (step + 1) * edge, step + 1] for step, token in enumerate(chain[:length])]
        nodes += [[token, step - 1, (step + 2) * edge, step + 1] for step, token in enumerate(runners[:length]) if token != chain[step]]
        base = ids[self.slm.length :]
        if len(base) + len(nodes) > capacity:
            self.slm.prefill(base[:-1])
            base = base[-1:]
        fed = nodes[: capacity - len(base)]  # node n is row len(base) + n of the pass; the root, -1, the last row of the base
        parents = [*range(ROOT, len(base) - 1), *(len(base) + node[1] for node in fed)]
        self.outputs = self.slm.run(self.slm.tree, [*base, *(node[0] for node in fed)], parents)
        scale = self.slm.tree.outputs["logits"]["scale"] / self.rule["temperature"]
        for place in (place for place in range(ROOT, len(fed)) if place == ROOT or nodes[place][0] not in self.stops):
            score, depth = nodes[place][2:] if place != ROOT else (0.0, 0)
            present = {node[0] for node in nodes if node[1] == place}
            for column, log_q in best_children(self.outputs["logits"][len(base) + place], scale, self.rule["candidates_per_row"]):
                if (token := int(self.head.kept[column])) not in present: nodes.append([token, place, edge + score + log_q, depth + 1])
        self.slm.commit(self.outputs, list(range(len(base))))  # the base, root included, is committed text
        kept = sorted(sorted(range(len(nodes)), key=lambda n: (-nodes[n][2], nodes[n][3], n))[: self.rule["budget"]])
        self.rows = [len(base) + n if n < len(fed) else None for n in kept]  # in the pass
        return [nodes[n][0] for n in kept], [kept.index(nodes[n][1]) if nodes[n][1] != ROOT else ROOT for n in kept]
    def observe(self, accepted, root, handoff):  # the verdict: K/V of the accepted path stay up to the first node that the pass did not hold
        self.head.take(handoff, root)
        rows = [*(self.rows[row] for row in accepted), None]
        self.slm.commit(self.outputs, rows[: rows.index(None)])

def converse(drafter, facts, call, ids, settings):  # the tokens of PRIME, then of every round; `call(method, path, body)` gives the body of the answer
    request = [1, ids, *settings[:4], "device", 0, facts["server"]["head_digest"], 0, False, "full", False, *settings[4:]]
    _, session, root, _, finished, handoff, *_ = call("POST", "/v1/sessions", pack(request))
    ids, number = [*ids, root], 0
    yield [root]
    if not finished:
        drafter.head.take(handoff, len(ids) - 1, begin=True)
        drafter.slm.begin(ids)
    while not finished:
        tree, number = drafter.propose(ids), number + 1
        digest = hashlib.blake2b(np.asarray(ids, "<i4").tobytes(), digest_size=8).digest()
        reply = call("POST", f"/v1/sessions/{session}/rounds/{number}", pack([1, len(ids), digest, *tree, []]))
        accepted, (new, finished, handoff) = reply[2], reply[4:7]
        ids += new
        yield new
        if not finished: drafter.observe(accepted, len(ids) - 1, handoff)
    call("DELETE", f"/v1/sessions/{session}", b"")

def caller(url, token):  # calls over one kept connection. A port also sends a round again whose answer was lost (PROTOCOL.md, chapter 6)
    parts, headers = urllib.parse.urlsplit(url), {"Content-Type": "application/msgpack"} | ({"Authorization": f"Bearer {token}"} if token else {})
    connection = {"https": http.client.HTTPSConnection, "http": http.client.HTTPConnection}[parts.scheme](parts.netloc, timeout=120)
    def call(method, path, body):
        connection.request(method, parts.path.rstrip("/") + path, body or None, headers)
        answer = connection.getresponse()
        reply = unpack(io.BytesIO(answer.read() or b"\xc0"))
        return reply if answer.status < 400 else sys.exit("the server refuses: {1}: {2} ({3})".format(*reply))
    return call
def load(root, name, spec): return np.fromfile(root / name, np.dtype(spec["dtype"]).newbyteorder("<")).reshape(spec["shape"])

class Recorded:  # a graph of a golden session: what the host feeds must be what was recorded; the recorded outputs come back
    def __init__(self, root, graph, calls):
        self.root, self.name, self.calls, self.inputs, self.outputs = root, graph.name, calls, graph.inputs, graph.outputs
    def run(self, feeds):
        case = next(self.calls)
        for name, spec in self.inputs.items():  # libraries of mathematics round cos and sin differently: 1 step
            off = np.abs(load(self.root, case["inputs"][name], spec).astype(np.int64) - feeds[name]).max()
            if case["graph"] != self.name or off > (name[:4] in ("cos.", "sin.")):
                sys.exit(f"{case['id']}: the host feeds another {name} to {self.name} than was recorded")
        return {n: load(self.root, (case["outputs"].get("altered") or case["outputs"]["integer graph"])[n], spec) for n, spec in self.outputs.items()}

def check_graph(root, facts, graph, backend):  # every golden vector of one graph; are all within the tolerance?
    rule, ids, count, outside, equal, total = facts["tolerance"], 0, 0, [], 0, 0
    for case in (case for case in facts["cases"] if case["graph"] == graph.name):
        found = graph.run({name: load(root, case["inputs"][name], spec) for name, spec in graph.inputs.items()})
        expected = case["outputs"].get("emulator" if backend == "qnn" else "") or case["outputs"]["integer graph"]
        for name, spec in graph.outputs.items():
            off = np.abs(load(root, expected[name], spec).astype(np.int64) - found[name])
            if spec["row_axis"] is not None: off = off.take(range(case["rows"]), spec["row_axis"])  # the others are padding
            equal, total = equal + (not off.any()), total + 1
            if spec["scale"] is None: ids, count = ids + int((off == 0).sum()), count + off.size
            elif (off > spec["tolerance_steps"]).mean() > rule["outside_share"]: outside.append(f"{case['id']}/{name}")
    outside += [f"{count - ids} of {count} ids"] if ids < rule["equal_ids_share"] * count else []
    print(f"{graph.name}: {total} outputs, {equal} equal, {len(outside)} outside the tolerance", *outside)
    return not outside

def check_session(root, facts, graphs, session):  # a recorded conversation: graph inputs, trees and requests must come out again from its replies
    steps, calls = iter(session["exchanges"]), (case for name in session["calls"] for case in facts["cases"] + facts["host_cases"] if case["id"] == name)
    def answer(method, path, body):
        step = next(steps)
        if (method, path, body) != (step["method"], step["path"], (root / step["request"]).read_bytes()):
            sys.exit(f"session {session['id']}: the request {method} {path} is not the recorded one")
        return unpack(io.BytesIO((root / step["reply"]).read_bytes() or b"\xc0"))
    prime = unpack(io.BytesIO((root / session["exchanges"][0]["request"]).read_bytes()))
    drafter = Drafter(root, facts, {name: Recorded(root, graph, calls) for name, graph in graphs.items()})
    steps_made = list(converse(drafter, facts, answer, prime[1], [*prime[2:6], *prime[13:]]))
    print(f"session {session['id']}: {len(session['calls'])} passes, {len(steps_made) - 1} rounds, all as recorded")

def chat(root, facts, graphs, options):
    drafter, call, rule = Drafter(root, facts, graphs), caller(options.server, options.token), facts["server"]
    settings = [rule["sampling"], rule["acceptance"], options.seed, options.tokens, 0, ""]
    if options.ids: return print(*sum(converse(drafter, facts, call, [int(one) for one in options.ids.split(",")], settings), []))
    from tokenizers import Tokenizer
    tokenizer, text, template = Tokenizer.from_file(str(root / facts["tokenizer"])), "", facts["chat"]
    for turn, prompt in enumerate(options.prompt):
        text += template["between" if turn else "before"] + prompt.strip() + template["after"]
        steps = list(converse(drafter, facts, call, tokenizer.encode(text, add_special_tokens=False).ids, settings))
        said = tokenizer.decode(sum(steps, []))
        print(f"> {prompt}\n{said}\n[{sum(map(len, steps))} tokens, {len(steps) - 1} rounds]")
        text += said.strip()

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=pathlib.Path)
    for name, default in {"server": "", "ids": "", "token": "", "seed": 1, "tokens": 64, "backend": "cpu"}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--prompt", action="append", default=[])
    facts = open_bundle((options := parser.parse_args()).bundle)
    if options.server and facts["slm_bridge"]: sys.exit(BRIDGED)
    threads = 0 if options.server else 1  # golden vectors: one, as they were made, for several add up in another order; 0 is all
    graphs = {name: Graph(options.bundle, facts, name, options.backend, threads) for name in facts["graphs"]}
    if options.server: return chat(options.bundle, facts, graphs, options)
    passed = [check_graph(options.bundle, facts, graph, options.backend) for graph in graphs.values()]
    if facts["slm_bridge"]: print(f"conversations are left out: {BRIDGED}")
    for session in facts["sessions"] if not facts["slm_bridge"] else (): check_session(options.bundle, facts, graphs, session)
    sys.exit(not all(passed))

if __name__ == "__main__": main()

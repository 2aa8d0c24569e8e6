/* The page's behaviour: tables that sort, two views by the address's hash, and the viewer of rounds.
 *
 * Rounds are gzipped JSON (page/rounds.py): answers with one list a field and one value a step. They are unpacked when
 * the viewer is first shown, and only what is looked at is drawn. */
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const SOURCES = ["chain", "runner-up", "slm"]; // protocol.tree.Source
  const COLORS = { chain: 1, "runner-up": 2, slm: 3, bonus: 4, unverified: 5, prime: 4 };
  const WORDS = { slm: "SLM", chain: "head's chain" }; // of a source, where it is more than its name
  const ROOT = -1;
  const LISTED = 300; // answers in the list at once
  const LABEL = 12; // characters of a token in the tree
  const GAP = 64, ROW = 29, PILL = 20, WIDEST = 102, LEFT = 8, TOP = 22; // pixels of the tree
  const SLOW = 0.95; // a round is slow beyond this share of its system's

  // ---- elements

  function el(name, attributes = {}, ...children) {
    const svg = ["svg", "rect", "path", "text", "g", "title"].includes(name);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== ""));
    return made;
  }

  const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
  const ms = (value) => (value < 10 ? value.toFixed(2) : value.toFixed(1));
  const probability = (p) => (p === 0 || p === 1 ? String(p) : p < 0.001 ? p.toExponential(1) : p.toFixed(3).replace(/^0/, ""));

  // ---- tables

  function sortable(table) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = el("button", { type: "button" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => sortBy(table, head, column));
    });
  }

  function sortBy(table, head, column) {
    const numeric = !head.classList.contains("text");
    const up = head.getAttribute("aria-sort") === (numeric ? "descending" : "ascending") ? !numeric : numeric;
    const descending = numeric ? up : !up && head.hasAttribute("aria-sort");
    const value = (row) => row.cells[column].dataset.value;
    const order = (a, b) => {
      const [one, other] = [value(a), value(b)];
      if (one === undefined || other === undefined) return (one === undefined) - (other === undefined); // missing: last
      const less = numeric ? Number(one) - Number(other) : one.localeCompare(other, "en", { numeric: true });
      return descending ? -less : less;
    };
    for (const cell of head.parentNode.cells) cell.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
  }

  /* A table of the viewer; a cell is a text, or [text, value to sort by]. Columns marked "…" are texts. */
  function tableOf(caption, columns, rows) {
    const cell = (entry, index) => {
      const [shown, value] = Array.isArray(entry) ? entry : [entry, entry];
      const text = columns[index].endsWith("…");
      return el(index ? "td" : "th", { class: text && "text", scope: !index && "row", "data-value": value ?? undefined }, shown);
    };
    const head = columns.map((name) => el("th", { scope: "col", class: name.endsWith("…") && "text" }, name.replace("…", "")));
    const body = rows.map((row) => el("tr", {}, ...row.map(cell)));
    const made = el(
      "table", { class: "data" },
      el("caption", { class: "unseen" }, caption), el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body),
    );
    sortable(made);
    return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, made);
  }

  document.querySelectorAll("table.data").forEach(sortable);

  // ---- views: #rounds/FOLDER/SYSTEM/PROMPT/SEED/STEP is a round, anything else a place in the results

  let data = null; // what page/rounds.py packed
  const at = { source: 0, system: 0, answer: null, step: 0 };

  async function unpack() {
    const text = atob($("recorded").textContent);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  }

  /* The parts of the address; none of one that was broken on its way. */
  function places() {
    try {
      return location.hash.slice(1).split("/").map(decodeURIComponent);
    } catch {
      return [];
    }
  }

  let reading = null; // one at a time, also where the address changes meanwhile

  async function read() {
    data = await unpack();
    begin();
  }

  async function route() {
    const parts = places();
    const viewing = parts[0] === "rounds" && $("rounds") !== null;
    $("results").hidden = viewing;
    if ($("rounds")) $("rounds").hidden = !viewing;
    for (const link of document.querySelectorAll("[data-view]")) {
      if ((link.dataset.view === "rounds") === viewing) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (!viewing) return;
    try {
      await (reading ??= read());
    } catch (error) {
      $("waiting").textContent = `The rounds cannot be read: ${error.message}. A browser of 2023 or later is needed.`;
      return;
    }
    follow(parts.slice(1));
  }

  /* Show what an address says; without one, the first answer of hyco. */
  function follow([source, system, prompt, seed, step]) {
    const index = (list, name) => Math.max(0, list.findIndex((one) => one.name === name)); // the first for an unknown one
    at.source = index(data.sources, source);
    const systems = data.sources[at.source].systems;
    at.system = index(systems, system ?? "hyco");
    choose();
    const answers = systems[at.system].answers;
    const asked = answers.find((one) => one.id === prompt && (seed === undefined || String(one.seed) === seed));
    if (prompt && !asked) $("found").textContent = `${prompt} is not on this page. ${$("found").textContent}`;
    show(asked ?? listed()[0]?.answer ?? answers[0], Number(step) || 0);
  }

  const system = () => data.sources[at.source].systems[at.system];
  const address = (answer, step) =>
    "#rounds/" + [data.sources[at.source].name, system().name, answer.id, answer.seed, step].map(encodeURIComponent).join("/");

  // ---- choosing: folder, system, search, filter, order

  const FILTERS = {
    "anything": () => true,
    "a token by the threshold alone": (s, i) => s.drawn[i].slice(0, s.accepted[i].length).includes(0),
    "a runner-up taken": (s, i) => s.accepted[i].some((row) => s.sources[i][row] === 1),
    "an SLM token taken": (s, i) => s.kind[i] === "round" && s.accepted[i].some((row) => s.sources[i][row] === 2),
    "no draft taken": (s, i) => s.kind[i] === "round" && !s.accepted[i].length,
    "the whole chain taken": (s, i) => wholeChain(s, i),
    "unverified tokens": (s, i) => s.kind[i] === "local" || s.kept[i] > 0,
    "a disturbed call": (s, i) => s.lost[i] !== null,
    "the slowest 5 %": (s, i) => s.kind[i] === "round" && total(s, i) > slowBeyond(),
  };

  function wholeChain(s, i) {
    const chain = s.sources[i].flatMap((source, row) => (source === 0 ? [row] : []));
    return s.kind[i] === "round" && chain.length > 0 && chain.every((row) => s.accepted[i].includes(row));
  }

  const total = (s, i) => s.draft[i] + s.wait[i] + (s.kind[i] === "prime" ? s.prefill[i] : s.commit[i]);
  const length = (answer) => answer.steps.kind.length;
  const rounds = (answer) => answer.steps.kind.filter((kind) => kind === "round").length;
  const text = (answer) => (answer.text ??= answer.tokens.map((_, i) => piece(answer, i)).join(""));
  const piece = (answer, i) => (answer.pieces ? answer.pieces[i] : `${answer.tokens[i]} `);
  const said = (who) => WORDS[who] ?? who;
  const word = (token) => data.texts[token] ?? String(token);

  function mat(answer) {
    const s = answer.steps;
    const found = s.committed.reduce((sum, n, i) => sum + (s.kind[i] === "round" ? n : 0), 0);
    return rounds(answer) ? found / rounds(answer) : NaN;
  }

  /* Times of all rounds of the chosen system, in ascending order. */
  function allTimes() {
    return (system().times ??= system()
      .answers.flatMap((answer) => answer.steps.kind.map((kind, i) => (kind === "round" ? total(answer.steps, i) : NaN)))
      .filter((value) => value === value).sort((a, b) => a - b));
  }
  const slowBeyond = () => allTimes()[Math.floor(SLOW * allTimes().length)] ?? Infinity;

  const matches = (answer) => {
    const fits = FILTERS[$("filter").value];
    return answer.steps.kind.flatMap((_, i) => (fits(answer.steps, i) ? [i] : []));
  };

  /* Answers that search and filter leave, in the chosen order, with where the search was found in their text. */
  function listed() {
    const wanted = $("search").value.trim().toLowerCase(), all = $("filter").value === "anything";
    const found = [];
    for (const answer of system().answers) {
      const inText = wanted ? text(answer).toLowerCase().indexOf(wanted) : -1;
      if (wanted && inText < 0 && !`${answer.id}\n${answer.prompt}`.toLowerCase().includes(wanted)) continue;
      const hits = all ? [] : matches(answer);
      if (all || hits.length) found.push({ answer, inText, hits });
    }
    const by = { mat: (one) => mat(one.answer), slow: (one) => -one.answer.ms }[$("order").value];
    return by ? found.sort((a, b) => by(a) - by(b)) : found;
  }

  function choose() {
    const options = (list, chosen) => list.map((one, i) => el("option", { value: i, selected: i === chosen }, one.name));
    $("source").replaceChildren(...options(data.sources, at.source));
    $("system").replaceChildren(...options(data.sources[at.source].systems, at.system));
    list();
  }

  function list() {
    const found = listed(), wanted = $("search").value.trim(), filtered = $("filter").value !== "anything";
    const hits = found.reduce((sum, one) => sum + one.hits.length, 0), all = found.reduce((sum, one) => sum + rounds(one.answer), 0);
    $("found").textContent = `${count(found.length, "answer")}, ${filtered ? `${count(hits, "step")} of them such` : count(all, "round")}`;
    const items = found.slice(0, LISTED).map((one) => el("li", {}, item(one, wanted)));
    if (found.length > LISTED) items.push(el("li", { class: "muted" }, `and ${found.length - LISTED} more: search for one`));
    if (data.every > 1) items.push(el("li", { class: "muted" }, `Of every system one answer in ${data.every} is on this page (report --rounds).`));
    const failed = system().failures.map(([id, why]) => el("li", { class: "failed" }, `${id} failed: ${why}`));
    $("answers").replaceChildren(...items, ...failed);
    $("match").hidden = !filtered;
    mark();
  }

  function item({ answer, inText, hits }, wanted) {
    const facts = [rounds(answer) ? `${count(rounds(answer), "round")}, MAT ${mat(answer).toFixed(2)}` : count(length(answer), "step"), count(answer.tokens.length, "token")];
    if (hits.length) facts.unshift(`${hits.length} found`);
    const button = el("button", { type: "button" }, answer.id, el("small", {}, facts.join(", ")));
    if (inText >= 0) {
      const whole = text(answer), end = inText + wanted.length;
      button.append(el("small", {}, "…" + whole.slice(Math.max(0, inText - 24), inText), el("mark", {}, whole.slice(inText, end)), whole.slice(end, end + 32) + "…"));
    }
    button.addEventListener("click", () => show(answer, inText >= 0 ? stepOfCharacter(answer, inText + wanted.length - 1) : (hits[0] ?? 0)));
    button.answer = answer;
    return button;
  }

  function stepOfCharacter(answer, place) {
    let end = 0;
    const token = answer.tokens.findIndex((_, i) => (end += piece(answer, i).length) > place);
    return owners(answer)[Math.max(0, token)].step;
  }

  function mark() {
    for (const button of $("answers").querySelectorAll("button")) {
      if (button.answer === at.answer) {
        button.setAttribute("aria-current", "true");
        const list = $("answers"), top = button.offsetTop - list.offsetTop;
        if (top < list.scrollTop || top + button.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = top;
      } else button.removeAttribute("aria-current");
    }
  }

  // ---- one step

  /* The step that committed each token, and who proposed it. */
  function owners(answer) {
    if (answer.owners) return answer.owners;
    const s = answer.steps;
    answer.owners = s.kind.flatMap((kind, step) =>
      Array.from({ length: s.committed[step] }, (_, i) => {
        if (kind !== "round") return { step, who: kind === "prime" ? "prime" : "unverified" };
        const row = s.accepted[step][i];
        return { step, who: row === undefined ? "bonus" : SOURCES[s.sources[step][row] ?? 0] };
      }));
    return answer.owners;
  }

  /* Number of the answer's first token that a step committed. */
  const first = (answer, step) => answer.steps.committed.slice(0, step).reduce((sum, n) => sum + n, 0);
  const NAMES = { prime: "Prompt", round: "Round", local: "Kept unasked" };

  function name(answer, step) {
    const s = answer.steps, kind = s.kind[step];
    return kind === "round" ? `Round ${s.round[step]} of ${rounds(answer)}` : `${NAMES[kind]}, step ${step + 1} of ${length(answer)}`;
  }

  function show(answer, step) {
    if (!answer) return;
    const other = at.answer !== answer;
    at.answer = answer;
    at.step = Math.min(Math.max(0, step), length(answer) - 1);
    $("waiting").hidden = true;
    $("shown").hidden = false;
    if (other) {
      showAnswer(answer);
      mark();
    }
    history.replaceState(null, "", address(answer, at.step));
    $("link").href = address(answer, at.step);
    $("place").textContent = name(answer, at.step);
    $("previous").disabled = at.step === 0;
    $("next").disabled = at.step === length(answer) - 1;
    for (const bar of $("strip").querySelectorAll("g")) bar.classList.toggle("now", Number(bar.dataset.step) === at.step);
    placeMarker();
    showText(answer);
    showVerdict(answer, at.step);
    $("tree").replaceChildren(drawTree(answer, at.step));
    showTimes(answer, at.step);
    if ($("nodes-behind").open) showNodes();
    $("spoken").textContent = `${name(answer, at.step)}: ${$("verdict").textContent}`;
  }

  function showAnswer(answer) {
    const scores = (answer.scores ?? []).map(([metric, value, reason]) => `${metric} ${value === null ? `missing (${reason})` : +value.toFixed(2)}`);
    const rule = answer.rule ? `rule ${answer.rule}${answer.epsilon < 1 ? `, ε = ${answer.epsilon}` : ""}` : "";
    $("about").textContent = [data.sources[at.source].name, system().name, answer.task,
      answer.generation === undefined ? "" : `generation ${answer.generation}`, `seed ${answer.seed}`].filter(Boolean).join(" · ");
    $("about").title = system().means;
    $("title").textContent = answer.id;
    $("asked").hidden = !answer.prompt;
    $("prompt").textContent = answer.prompt;
    $("asked").querySelector("summary").textContent =
      `Prompt, ${count(answer.length, "token")}` + (scores.length ? `; ${scores.join(", ")}` : "");
    $("asked").title = rule;
    $("text").replaceChildren(...answer.tokens.map((token, i) => textSpan(answer, token, i)));
    $("strip").replaceChildren(drawStrip(answer));
    if ($("rounds-behind").open) showRounds();
  }

  function textSpan(answer, token, i) {
    const { step, who } = owners(answer)[i];
    const span = el("span", { class: `token ${who}`, title: `${said(who)}, id ${token}` }, piece(answer, i));
    span.addEventListener("click", () => show(answer, step));
    return span;
  }

  function showText(answer) {
    const begin = first(answer, at.step), end = begin + answer.steps.committed[at.step];
    [...$("text").children].forEach((span, i) => {
      span.classList.toggle("now", i >= begin && i < end);
      span.classList.toggle("later", i >= end);
    });
    const now = $("text").children[begin];
    if (now) $("text").scrollTop = Math.max(0, now.offsetTop - $("text").offsetTop - $("text").clientHeight / 2);
  }

  function showVerdict(answer, step) {
    const s = answer.steps, kind = s.kind[step], nodes = s.tokens[step].length, taken = s.accepted[step].length;
    const alone = s.drawn[step].slice(0, taken).filter((drawn) => !drawn).length;
    const parts = [];
    if (kind === "prime") parts.push("the server read the prompt and drew the first token");
    else if (kind === "local") parts.push(`${count(taken, "token")} kept without asking the verifier`);
    else {
      parts.push(`${count(nodes, "node")} judged, ${taken} taken${alone ? ` (${alone} by the threshold alone)` : ""}, ${count(s.committed[step], "token")} committed`);
      if (answer.rule) parts.push(`rule ${answer.rule}${answer.epsilon < 1 ? ` with ε = ${answer.epsilon}` : ""}`);
      if (!s.draws[step].length) parts.push("p~ was not recorded");
      if (s.reused[step]) parts.push(`${count(s.reused[step], "node")} drafted while the last reply was on its way`);
    }
    if (s.lost[step] !== null) parts.push("disturbed: in no figure of time");
    $("verdict").textContent = parts.join("; ") + ".";
  }

  // ---- tree

  /* Columns are depths; siblings stand in the order of (source, node), each row as high as the columns allow. */
  function layout(parents, ranks) {
    const children = new Map([[ROOT, []]]);
    parents.forEach((parent, node) => { children.set(node, []); children.get(parent).push(node); });
    const sorted = (nodes) => [...nodes].sort((a, b) => ranks[b] - ranks[a] || b - a); // the first one last
    const column = new Map([[ROOT, 0]]), row = new Map([[ROOT, 0]]), free = [];
    const stack = sorted(children.get(ROOT));
    while (stack.length) {
      const node = stack.pop(), depth = column.get(parents[node]) + 1;
      column.set(node, depth);
      row.set(node, Math.max(free[depth] ?? 0, row.get(parents[node])));
      free[depth] = row.get(node) + 1;
      stack.push(...sorted(children.get(node)));
    }
    return [column, row];
  }

  function label(token) {
    const shown = word(token).replaceAll("\n", "⏎").replaceAll(" ", "·") || "∅";
    return shown.length <= LABEL ? shown : shown.slice(0, LABEL - 1) + "…";
  }

  const measurer = document.createElement("canvas").getContext("2d");
  measurer.font = "12px ui-monospace, Menlo, monospace";
  const width = (shown) => Math.min(WIDEST, measurer.measureText(shown).width + 16);

  const beside = (p) => (p === undefined ? 0 : 9 + 6 * probability(p).length); // pixels that p~ takes behind its pill

  const isDrawn = (s, step, node) => s.draws[step].length > 0 && s.draws[step][s.parents[step][node] + 1] === s.tokens[step][node];

  function drawTree(answer, step) {
    const s = answer.steps, tokens = s.tokens[step], taken = s.accepted[step];
    if (!tokens.length && s.kind[step] === "prime") return el("p", { class: "muted small" }, "No tree: drafting begins with the next step.");
    const begin = first(answer, step), bonus = s.kind[step] === "round" && s.committed[step] > taken.length;
    const parents = [...s.parents[step]], ranks = tokens.map((_, row) => s.sources[step][row] ?? 0);
    const unknown = taken.length && !tokens.length; // the server's own chain, recorded without p~
    if (unknown) taken.forEach((_, row) => { parents.push(row - 1); ranks.push(0); });
    const nodes = unknown ? answer.tokens.slice(begin, begin + taken.length) : tokens;
    if (bonus) { parents.push(taken.length ? taken[taken.length - 1] : ROOT); ranks.push(SOURCES.length); }
    const [column, row] = layout(parents, ranks);
    const shown = (node) => label(node === ROOT ? answer.tokens[begin - 1] : node < nodes.length ? nodes[node] : answer.tokens[begin + taken.length]);
    const widest = []; // pill of each column
    for (const [node, depth] of column) widest[depth] = Math.max(widest[depth] ?? 0, width(shown(node)));
    const lefts = widest.map((_, depth) => LEFT + widest.slice(0, depth).reduce((sum, one) => sum + one + GAP, 0));
    const x = (node) => lefts[column.get(node)], y = (node) => TOP + row.get(node) * ROW;
    const last = Math.max(...row.values());
    const drawing = el("svg", { width: lefts.at(-1) + widest.at(-1) + GAP, height: TOP + (last + 1) * ROW + 6, "aria-hidden": "true" });
    lefts.forEach((left, depth) => drawing.append(el("text", { class: "depth", x: left, y: 11 }, depth ? `depth ${depth}` : "root")));
    const path = new Set([...taken, nodes.length]);
    parents.forEach((parent, node) => {
      const from = x(parent) + width(shown(parent)) + beside(s.probs[step][parent]), to = x(node), middle = to - 20, [a, b] = [y(parent) + PILL / 2, y(node) + PILL / 2];
      drawing.append(el("path", { class: `edge${path.has(node) ? " taken" : ""}`, d: `M${from} ${a}C${middle} ${a} ${middle} ${b} ${to} ${b}` }));
    });
    drawing.append(pill(x(ROOT), y(ROOT), shown(ROOT), "var(--ink)", { filled: true }));
    nodes.forEach((token, node) => {
      const alone = taken.includes(node) && s.drawn[step][taken.indexOf(node)] === 0;
      const look = { filled: taken.includes(node), dashed: alone, ring: isDrawn(s, step, node), p: s.probs[step][node] };
      const who = s.kind[step] === "local" ? "unverified" : SOURCES[ranks[node]];
      const made = pill(x(node), y(node), shown(node), `var(--series-${COLORS[who]})`, look);
      made.append(el("title", {}, `${word(token)} (id ${token}), ${said(who)}${look.p === undefined ? "" : `, p~ ${probability(look.p)}`}: ${fate(answer, step, node)}`));
      made.addEventListener("click", () => chosen(node));
      drawing.append(made);
    });
    if (bonus) drawing.append(pill(x(nodes.length), y(nodes.length), shown(nodes.length), `var(--series-${COLORS.bonus})`, { filled: true }));
    return drawing;
  }

  function pill(x, y, shown, color, { filled, dashed, ring, p }) {
    const wide = width(shown), made = el("g", { class: "node" });
    const edge = { stroke: dashed ? "var(--ink)" : color, "stroke-dasharray": dashed && "3 2", "stroke-width": dashed ? 1.6 : 1 };
    if (ring) made.append(el("rect", { class: "ring", x: x - 3, y: y - 3, width: wide + 6, height: PILL + 6, rx: 12 }));
    made.append(el("rect", { x, y, width: wide, height: PILL, rx: 9, fill: filled ? color : "var(--surface)", ...edge }));
    made.append(el("text", { x: x + wide / 2, y: y + 14, "text-anchor": "middle", fill: filled ? "var(--surface)" : "var(--ink)" }, shown));
    if (p !== undefined) made.append(el("text", { class: "p", x: x + wide + 6, y: y + 14 }, probability(p)));
    return made;
  }

  /* What became of a node, and why. */
  function fate(answer, step, node) {
    const s = answer.steps, place = s.accepted[step].indexOf(node), p = s.probs[step][node];
    if (s.kind[step] === "local") return place >= 0 ? "kept unasked" : "not kept";
    if (place >= 0 && s.drawn[step][place]) return "taken: the verifier drew it";
    if (place >= 0) return answer.rule === "epsilon" && p !== undefined ? `taken by the threshold: p~ ${probability(p)} ≥ ${answer.epsilon}` : "taken by the threshold";
    if (isDrawn(s, step, node)) return "drawn, but not on the chosen path";
    if (answer.rule === "epsilon" && p >= answer.epsilon) return "above the threshold, but not on the chosen path";
    return "not taken";
  }

  function chosen(node) {
    $("nodes-behind").open = true;
    showNodes();
    const row = $("nodes").querySelectorAll("tbody tr")[node];
    row.querySelector("th").setAttribute("tabindex", -1);
    row.querySelector("th").focus();
  }

  function showNodes() {
    const s = at.answer.steps, step = at.step, depth = [];
    const rows = s.tokens[step].map((token, node) => {
      const parent = s.parents[step][node], p = s.probs[step][node], score = s.scores[step][node], draws = s.draws[step];
      depth[node] = parent === ROOT ? 1 : depth[parent] + 1;
      return [
        [String(node), node], [JSON.stringify(word(token)), word(token)], [String(token), token], said(SOURCES[s.sources[step][node] ?? 0]),
        [String(depth[node]), depth[node]], parent === ROOT ? "root" : `${parent} ${label(s.tokens[step][parent])}`,
        [score === undefined ? "–" : score.toFixed(3), score], [p === undefined ? "–" : probability(p), p],
        draws.length ? JSON.stringify(word(draws[parent + 1])) : "–", fate(at.answer, step, node),
      ];
    });
    const columns = ["node", "token…", "id", "source…", "depth", "under…", "draft score, log p", "p~", "verifier drew there…", "outcome…"];
    $("nodes").replaceChildren(rows.length ? tableOf("Nodes of this round", columns, rows) : el("p", { class: "muted" }, "No nodes."));
  }

  // ---- times, bytes, the strip of rounds

  function phases(s, step) {
    const prime = s.kind[step] === "prime";
    return [
      ["head", s.head[step], 1], ["SLM", s.slm[step], 3], ["scoring", Math.max(0, s.draft[step] - s.head[step] - s.slm[step]), 2],
      ["network, queue", Math.max(0, s.wait[step] - s.server[step]), 0], ["server", s.server[step], 4],
      [prime ? "device's prefill" : "ring commit", prime ? s.prefill[step] : s.commit[step], 5],
    ];
  }

  function showTimes(answer, step) {
    const s = answer.steps, parts = phases(s, step), sum = total(s, step);
    const color = (series) => (series ? `var(--series-${series})` : "var(--faint)");
    $("phases").replaceChildren(...parts.filter(([, value]) => value > 0).map(([, value, series]) => el("i", { style: `flex: ${value} 0 0; background: ${color(series)}` })));
    const rows = parts.map(([what, value, series]) => [[el("span", {}, el("i", { class: "swatch", style: `background: ${color(series)}` }), what), what], [ms(value), value], [sum ? `${((100 * value) / sum).toFixed(0)} %` : "–", value]]);
    rows.push([["together", "together"], [ms(sum), sum], ["", -1]]);
    const all = allTimes(), slower = all.length ? all.filter((value) => value < sum).length / all.length : 0;
    const told = s.kind[step] === "round" ? `Slower than ${(100 * slower).toFixed(0)} % of ${count(all.length, "round")} of ${system().name}; begun ${ms(s.start[step])} ms after the request.` : `Begun ${ms(s.start[step])} ms after the request.`;
    const ahead = s.ahead[step] ? ` While waiting the device drafted ${ms(s.ahead[step])} ms.` : "";
    $("times").replaceChildren(tableOf("Times of this step", ["phase…", "ms", "share"], rows), el("p", { class: "muted small" }, told + ahead));
    const bytes = (value) => [value.toLocaleString("en"), value];
    $("bytes").replaceChildren(tableOf("Bytes of this step", ["direction…", "body, B", "with HTTP, B"], [["up", bytes(s.up[step]), bytes(s.wire_up[step])], ["down", bytes(s.down[step]), bytes(s.wire_down[step])]]));
  }

  /* One bar a step, as high as what it committed, its parts in the colours of their sources. */
  function drawStrip(answer) {
    const s = answer.steps, n = length(answer), high = Math.max(...s.committed, 1), wide = Math.min(1, 40 / n), who = owners(answer);
    const drawing = el("svg", { viewBox: `0 0 ${Math.max(n, 40)} ${high + 0.6}`, preserveAspectRatio: "none" });
    let token = 0;
    for (let step = 0; step < n; step++) {
      const bar = el("g", { "data-step": step }, el("rect", { x: step, y: 0, width: 1, height: high + 0.6, fill: "transparent" }));
      for (let i = 0; i < s.committed[step]; i++, token++) {
        const series = who[token].who === "prime" ? "var(--muted)" : `var(--series-${COLORS[who[token].who]})`;
        bar.append(el("rect", { x: step + 0.12, y: high - i - 1, width: 0.76, height: 0.9, fill: series }));
      }
      bar.append(el("title", {}, `${name(answer, step)}: ${count(s.committed[step], "token")}`));
      bar.addEventListener("click", () => show(answer, step));
      drawing.append(bar);
    }
    drawing.append(el("rect", { id: "marker", x: 0, y: high + 0.25, width: 1, height: 0.35, fill: "var(--ink)" }));
    return drawing;
  }

  const placeMarker = () => $("marker").setAttribute("x", at.step);

  function showRounds() {
    const s = at.answer.steps;
    const rows = s.kind.map((kind, step) => {
      const to = el("a", { href: address(at.answer, step) }, `${NAMES[kind].toLowerCase()}${kind === "round" ? ` ${s.round[step]}` : ""}`);
      const added = at.answer.tokens.slice(first(at.answer, step), first(at.answer, step) + s.committed[step]).map(word).join("");
      return [[to, step], [JSON.stringify(added), added], [String(s.tokens[step].length), s.tokens[step].length], [String(s.accepted[step].length), s.accepted[step].length], [String(s.committed[step]), s.committed[step]], [ms(total(s, step)), total(s, step)], [ms(s.server[step]), s.server[step]], [s.up[step].toLocaleString("en"), s.up[step]], [s.down[step].toLocaleString("en"), s.down[step]]];
    });
    $("table").replaceChildren(tableOf("Rounds of this answer", ["step", "text…", "nodes", "taken", "committed", "ms", "server ms", "B up", "B down"], rows));
  }

  // ---- keys and buttons

  const step = (by) => show(at.answer, at.step + by);

  function turn(by) {
    const found = listed(), here = found.findIndex((one) => one.answer === at.answer);
    const next = found[here + by];
    if (next) show(next.answer, next.hits[0] ?? 0);
  }

  /* The next (or previous) step that the filter finds, in this answer or a later one of the list. */
  function toMatch(by) {
    const places = listed().flatMap(({ answer, hits }) => hits.map((hit) => ({ answer, hit })));
    const answers = listed().map((one) => one.answer), here = answers.indexOf(at.answer);
    const after = ({ answer, hit }) => by * (answers.indexOf(answer) - here || hit - at.step) > 0;
    const found = (by > 0 ? places : places.reverse()).find(after);
    if (found) show(found.answer, found.hit);
  }

  const KEYS = {
    ArrowRight: () => step(1), j: () => step(1), ArrowLeft: () => step(-1), k: () => step(-1),
    Home: () => show(at.answer, 0), End: () => show(at.answer, Infinity),
    n: () => turn(1), p: () => turn(-1), m: () => toMatch(1), M: () => toMatch(-1),
    "/": () => $("search").focus(), t: () => ($("nodes-behind").open = !$("nodes-behind").open),
    Escape: () => (location.hash = "#results"),
  };

  function pressed(event) {
    const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
    if ($("rounds").hidden || !at.answer || event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing) {
      if (event.key === "Escape") event.target.blur();
      if (event.key === "Enter" && event.target.id === "search") $("answers").querySelector("button")?.click();
      return;
    }
    if (!(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  }

  function begin() {
    $("filter").replaceChildren(...Object.keys(FILTERS).map((one) => el("option", {}, one)));
    $("source").parentNode.hidden = data.sources.length < 2;
    $("source").addEventListener("change", (event) => follow([data.sources[event.target.value].name]));
    $("system").addEventListener("change", (event) => follow([data.sources[at.source].name, data.sources[at.source].systems[event.target.value].name, at.answer?.id]));
    for (const id of ["search", "filter", "order"]) $(id).addEventListener("input", list);
    $("previous").addEventListener("click", () => step(-1));
    $("next").addEventListener("click", () => step(1));
    $("match").addEventListener("click", () => toMatch(1));
    $("nodes-behind").addEventListener("toggle", () => $("nodes-behind").open && showNodes());
    $("rounds-behind").addEventListener("toggle", () => $("rounds-behind").open && showRounds());
    document.addEventListener("keydown", pressed);
  }

  window.addEventListener("hashchange", route);
  route();
})();

// Search, sort and brush the rows of rows.html.
"use strict";
(() => {
  const MOST_HITS = 200, PAGE = 25;
  const element = (id) => document.getElementById(id);
  const parse = (id) => JSON.parse(element(id).textContent);
  const data = parse("data"), specs = parse("specs"), count = data.ids.length;
  const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const lower = data.tokens.map((token) => token.toLowerCase());
  const frequency = floats(data.frequency);
  const state = { arm: Object.keys(data.arms)[0], find: "", brush: null, sort: "rank", falling: false, shown: PAGE };
  let columns = {}, view = null, embedded = 0;

  const fixed = { token: (k) => data.tokens[k], id: (k) => data.ids[k], rank: (k) => k + 1,
    frequency: (k) => frequency[k], band: (k) => data.band[k] };
  const names = () => [...Object.keys(fixed), ...Object.keys(columns)];
  const value = (k, name) => (fixed[name] ? fixed[name](k) : columns[name][k]);
  const row = (k) => Object.fromEntries(names().map((name) => {
    const found = value(k, name);
    return [name, Number.isNaN(found) ? null : found];
  }));
  const shown = (found) => typeof found === "string" ? found : Number.isNaN(found) ? "-"
    : Number.isInteger(found) ? found.toLocaleString("en") : found.toPrecision(3);

  // Colours are variables of the page; the canvas has to be told what they are now.
  const colored = (spec) => {
    const style = getComputedStyle(document.documentElement);
    const text = JSON.stringify(spec).replaceAll("var(--arm)", data.arms[state.arm].color);
    return JSON.parse(text.replace(/var\(--([a-z0-9]+)\)/g, (_, name) => style.getPropertyValue(`--${name}`).trim()));
  };

  const matches = (k) => {
    const needle = state.find.toLowerCase();
    if (needle && !lower[k].includes(needle) && String(data.ids[k]) !== needle) return false;
    return !state.brush || Object.entries(state.brush).every(([name, [low, high]]) => {
      const found = value(k, name);
      return found >= Math.min(low, high) && found <= Math.max(low, high);
    });
  };

  const sorted = (places) => {
    if (state.sort === "rank" && !state.falling) return places;
    const sign = state.falling ? -1 : 1;
    return places.sort((a, b) => {
      const [x, y] = [value(a, state.sort), value(b, state.sort)];
      if (typeof x === "string") return sign * x.localeCompare(y, undefined, { numeric: true });
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return sign * (x - y);
    });
  };

  const cell = (kind, text, attributes = {}) => {
    const made = document.createElement(kind);
    made.textContent = text;
    Object.entries(attributes).forEach(([name, content]) => made.setAttribute(name, content));
    return made;
  };

  const drawTable = (places) => {
    const head = document.createElement("tr"), body = document.createElement("tbody");
    for (const name of names()) {
      const order = name === state.sort ? (state.falling ? "descending" : "ascending") : "none";
      const title = cell("th", "", { scope: "col", "aria-sort": order });
      const button = cell("button", name + { none: "", ascending: " ▲", descending: " ▼" }[order], { type: "button" });
      button.onclick = () => {
        const numeric = typeof value(0, name) !== "string";
        Object.assign(state, name === state.sort ? { falling: !state.falling } : { sort: name, falling: numeric });
        state.shown = PAGE;
        draw();
      };
      title.append(button);
      head.append(title);
    }
    for (const k of places.slice(0, state.shown)) {
      const line = document.createElement("tr");
      names().forEach((name, i) => line.append(cell(i ? "td" : "th", shown(value(k, name)), i ? {} : { scope: "row" })));
      body.append(line);
    }
    const top = document.createElement("thead");
    top.append(head);
    element("table").replaceChildren(top, body);
    element("more").hidden = places.length <= state.shown;
  };

  const drawHits = (places) => {
    if (!view) return;
    const hits = state.find ? places.slice(0, MOST_HITS).map(row) : [];
    view.data("hits", hits).resize().runAsync();
  };

  const draw = () => {
    const all = Array.from({ length: count }, (_, k) => k).filter(matches);
    element("count").textContent = `${all.length.toLocaleString("en")} of ${count.toLocaleString("en")} rows`;
    drawHits(all);
    drawTable(sorted(all));
  };

  const embed = async () => {
    const arm = data.arms[state.arm], turn = ++embedded;
    columns = Object.fromEntries(Object.entries(arm.columns).map(([name, text]) => [name, floats(text)]));
    if (!names().includes(state.sort)) Object.assign(state, { sort: "rank", falling: false });
    state.brush = null;
    const spec = colored(specs[arm.tied]), room = element("charts").clientWidth;
    spec.columns = room >= 900 ? spec.concat.length : 1;
    spec.concat.forEach((part) => { part.width = Math.max(Math.min(room / spec.columns - 70, 560), 200); });
    const places = data.many ? arm.top : data.ids.keys();
    spec.datasets = { rows: Array.from(places, row), bins: arm.bins, hits: [] };
    // Level 1, errors: it warns of datasets that are empty, as that of what was searched is at first.
    const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    const options = { actions: false, renderer: "canvas", logLevel: 1, tooltip: { theme } };
    const result = await vegaEmbed("#charts", spec, options);
    if (turn !== embedded) return result.finalize();
    if (view) view.finalize();
    view = result.view;
    view.addSignalListener("brush", (_, found) => {
      state.brush = found && Object.keys(found).length ? found : null;
      state.shown = PAGE;
      draw();
    });
    draw();
    document.body.dataset.ready = Math.round(performance.now());
  };

  for (const name of Object.keys(data.arms)) element("arm").append(cell("option", name));
  element("arm").onchange = (event) => { state.arm = event.target.value; embed(); };
  element("find").oninput = (event) => { state.find = event.target.value.trim(); state.shown = PAGE; draw(); };
  element("clear").onclick = () => { state.find = element("find").value = ""; embed(); };
  element("more").onclick = () => { state.shown += 4 * PAGE; draw(); };
  element("controls").onsubmit = (event) => event.preventDefault();
  element("controls").hidden = false;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", embed);
  let width = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; embed(); } }, 200);
  });
  embed();
})();

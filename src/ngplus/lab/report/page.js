"use strict";
// The charts, the table and the downloads of the page. Data come from the two elements of JSON, colours from the style.

const COLOURS = 9; // --c0 to --c8
const DASHES = ["solid", "dash", "dot", "dashdot"];
const sections = JSON.parse(document.getElementById("charts").textContent);
const touch = matchMedia("(pointer: coarse)").matches;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Plotly reads a few HTML tags in names and labels.
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");

const faded = (hex) => `rgba(${[1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)).join(",")},0.14)`;

function traces(chart, state) {
  const found = [];
  for (const curve of chart.curves.filter((curve) => !state.hidden.has(curve.place))) {
    const color = css(`--c${curve.place % COLOURS}`);
    const dash = DASHES[Math.floor(curve.place / COLOURS) % DASHES.length];
    const name = plain(curve.optimizer);
    const add = (x, y, more) => found.push({ type: "scatter", mode: "lines", x, y, name, ...more });
    if (curve.low.some((low, k) => low !== curve.high[k])) {
      const edge = { line: { width: 0 }, hoverinfo: "skip" };
      add(curve.x, curve.low, edge);
      add(curve.x, curve.high, { ...edge, fill: "tonexty", fillcolor: faded(color) });
    }
    if (curve.x.length) add(curve.x, curve.mean, { line: { color, dash, width: curve.place === 0 ? 3 : 1.8 } });
    for (const line of curve.seeds.filter((line) => line.diverged || state.seeds)) {
      const one = `${name}, seed ${line.seed}`;
      add(line.x, line.y, { line: { color, dash, width: 0.8 }, name: one });
      if (line.end === null) continue;
      const marker = { symbol: "x-thin", size: 9, line: { color, width: 2 } };
      const mark = { mode: "markers", marker, cliponaxis: false, text: "diverged", hoverinfo: "name+text" };
      add([line.end[0]], [line.end[1]], { ...mark, name: one });
    }
  }
  return found;
}

const least = (values) => values.reduce((found, value) => (value > 0 && value < found ? value : found), Infinity);
const greatest = (values) => values.reduce((found, value) => (value > found ? value : found), 0);

function range(low, high, log, values) {
  if (!log) return [low, high];
  const bottom = low > 0 ? low : least(values);
  return bottom < high ? [Math.log10(bottom), Math.log10(high)] : null; // null: as plotly finds it
}

function layout(chart, axes) {
  const lines = chart.curves.flatMap((curve) => [{ x: curve.x, y: curve.low }, ...curve.seeds]);
  const xs = lines.flatMap((line) => line.x);
  const axis = (log, limits) => ({
    type: log ? "log" : "linear", range: limits, autorange: limits === null,
    gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, hoverformat: ".4~g",
    exponentformat: "power", nticks: log ? 5 : 7, automargin: true,
  });
  const target = {
    type: "line", xref: "paper", x0: 0, x1: 1, y0: chart.target, y1: chart.target, layer: "below",
    line: { color: css("--front"), width: 1, dash: "dot" },
    label: { text: "target", textposition: "start", yanchor: "bottom", font: { size: 11, color: css("--soft") } },
  };
  return {
    autosize: true, margin: { l: 48, r: 10, t: 26, b: 40 }, showlegend: false,
    paper_bgcolor: css("--card"), plot_bgcolor: css("--card"),
    font: { family: "system-ui, sans-serif", size: 12, color: css("--soft") },
    xaxis: {
      ...axis(axes.x, range(0, greatest(xs) || 1, axes.x, xs)),
      title: { text: plain(chart.x_label), standoff: 6 },
    },
    yaxis: axis(axes.y, range(chart.bottom, chart.top, axes.y, lines.flatMap((line) => line.y))),
    shapes: chart.target === null ? [] : [target],
    hovermode: chart.x_label === "steps" ? "x unified" : "closest",
    hoverlabel: { bgcolor: css("--back"), font: { color: css("--front"), size: 12 }, namelength: 40 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--front") },
    dragmode: touch ? false : "zoom", // a finger on a chart scrolls the page
    uirevision: `${axes.x} ${axes.y}`, // what was zoomed stays so, until an axis changes
  };
}

function show(figure) {
  const config = {
    responsive: true, displaylogo: false, doubleClick: "reset",
    // By name: among the others is one that sends the chart to a server.
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]], plotlyServerURL: "",
    toImageButtonOptions: { filename: `${document.title} ${figure.chart.title}`, scale: 2 },
  };
  const { chart, state, axes } = figure;
  figure.shown = true;
  Plotly.react(figure.place, traces(chart, state), layout(chart, axes), config);
}

// ------------------------------------------------------------------------------------------------ charts of a page

const figures = [];
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const figure = figures.find((one) => one.place === entry.target);
    if (entry.isIntersecting && !figure.shown) show(figure);
  }
}, { rootMargin: "600px" });
const again = (chosen) => figures.filter((figure) => figure.shown && chosen(figure)).forEach(show);

sections.forEach((section, number) => {
  const root = document.getElementById(`s${number}`);
  const state = { hidden: new Set(), seeds: false };
  const mine = (figure) => figure.state === state;
  for (const box of root.querySelectorAll(".legend input")) {
    box.addEventListener("change", () => {
      if (box.name === "seeds") state.seeds = box.checked;
      else state.hidden[box.checked ? "delete" : "add"](Number(box.value));
      again(mine);
    });
  }
  root.querySelectorAll("figure").forEach((element, k) => {
    const place = element.querySelector(".chart");
    const figure = { place, chart: section[k], state, axes: { x: false, y: section[k].logarithmic }, shown: false };
    for (const box of element.querySelectorAll(".axes input")) {
      box.addEventListener("change", () => {
        figure.axes[box.value] = box.checked;
        show(figure);
      });
    }
    figures.push(figure);
    seen.observe(place);
  });
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => again(() => true));
window.addEventListener("beforeprint", () => figures.forEach(show));

// ------------------------------------------------------------------------------------------------ tables that sort

const key = (row, column) => {
  const cell = row.cells[column];
  if (!("key" in cell.dataset)) return [cell.textContent];
  return cell.dataset.key === "" ? null : cell.dataset.key.split(" ").map(Number);
};

function compare(one, other) {
  const k = one.findIndex((value, place) => value !== other[place]);
  return k < 0 ? 0 : one[k] < other[k] ? -1 : 1;
}

for (const table of document.querySelectorAll("table.numbers")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      for (const other of headings) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].map((row) => [key(row, column), row]);
      const known = rows.filter(([found]) => found !== null);
      known.sort(([one], [other]) => (down ? compare(other, one) : compare(one, other)));
      const empty = rows.filter(([found]) => found === null); // last either way
      table.tBodies[0].append(...[...known, ...empty].map(([, row]) => row));
    });
  });
}

// ------------------------------------------------------------------------------------------------ downloads

function csv(runs) {
  const cell = (value) => {
    if (typeof value !== "string") return value === null || value === undefined ? "" : String(value);
    return `"${(/^[=+\-@]/.test(value) ? "'" : "") + value.replace(/"/g, '""')}"`; // "=…" is a formula in spreadsheets
  };
  const metrics = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))];
  const lines = [["workload", "preset", "optimizer", "seed", "status", ...metrics]];
  for (const { config, metrics: columns, result } of runs) {
    const first = [config.workload, config.preset, config.optimizer, config.seed, result ? result.status : ""];
    (columns.step ?? []).forEach((_, k) => lines.push([...first, ...metrics.map((name) => (columns[name] ?? [])[k])]));
  }
  return lines.map((line) => `${line.map(cell).join(",")}\r\n`).join("");
}

function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

const held = () => document.getElementById("runs").textContent;
document.getElementById("json").addEventListener("click", () => save("runs.json", "application/json", held()));
document.getElementById("csv").addEventListener("click", () => save("runs.csv", "text/csv", csv(JSON.parse(held()).runs)));

"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read("figures"), dark = read("dark");
  const root = document.documentElement;
  const wanted = window.matchMedia("(prefers-color-scheme: dark)");
  const options = { responsive: true, displayModeBar: false, displaylogo: false, doubleClick: false };

  // ---- Light and dark -------------------------------------------------------------------------------------------
  let paper = false;  // while the page is printed
  const isDark = () => !paper && (root.dataset.theme ? root.dataset.theme === "dark" : wanted.matches);
  const recoloured = (value) => {
    if (typeof value === "string") return dark[value] || value;
    if (Array.isArray(value)) return value.map(recoloured);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, recoloured(each)]));
    }
    return value;
  };
  const remember = (theme) => { try { localStorage.setItem("coterie-theme", theme); } catch { /* a file may not */ } };
  const recall = () => { try { return localStorage.getItem("coterie-theme"); } catch { return null; } };
  const button = document.getElementById("theme");
  const show = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.ariaLabel = `${button.textContent} theme`;
  };
  if (["light", "dark"].includes(recall())) root.dataset.theme = recall();
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    delete root.dataset.drawn;
    show();
    drawAll();
  });
  wanted.addEventListener("change", () => { show(); drawAll(); });
  show();

  // ---- Figures --------------------------------------------------------------------------------------------------
  // A state's traces are laid over those of the figure: what it does not say stays as it is.
  const placeOf = (name) => document.querySelector(`[data-figure="${CSS.escape(name)}"] .plot`);
  const draw = (name) => {
    const figure = figures[name], place = placeOf(name);
    const state = figure.states[figure.at];
    let data = figure.data, layout = { ...figure.layout };
    if (state) {
      data = state.traces.map((trace, k) => ({ ...data[k], ...trace }));
      if (state.axis) layout.yaxis = { ...layout.yaxis, title: { ...layout.yaxis.title, text: state.axis } };
    }
    if (paper) {
      layout.width = place.closest(".half") ? HALF_OF_PAPER : PAPER;
      if ((layout.yaxis || {}).scaleanchor) layout.height = Math.min(layout.height, layout.width + 60);
    } else if (place.clientWidth < 480) {
      layout.margin = { ...layout.margin, r: 6 };
      if ((layout.yaxis || {}).scaleanchor) layout.height = Math.min(layout.height, place.clientWidth + 40);
      place.style.height = `${layout.height}px`;
    }
    const colours = (value) => isDark() ? recoloured(value) : structuredClone(value);
    return Plotly.react(place, colours(data), colours(layout), options);
  };
  // One after the other, those on the screen first; the others follow, the nearest first, while nothing else is to do.
  const distance = (name) => {
    const box = placeOf(name).getBoundingClientRect();
    return Math.max(0, box.top - window.innerHeight, -box.bottom);
  };
  const idle = window.requestIdleCallback || ((next) => setTimeout(next));
  let turn = 0;
  const drawAll = async () => {
    const mine = ++turn, left = window.Plotly ? Object.keys(figures) : [];
    while (left.length) {
      left.sort((a, b) => distance(a) - distance(b));
      const seen = distance(left[0]) === 0;
      if (!seen) performance.mark("coterie-screen-drawn");
      await new Promise((next) => seen ? setTimeout(next) : idle(next, { timeout: 300 }));
      if (mine !== turn) return;
      await draw(left.shift());
    }
    if (mine === turn) root.dataset.drawn = isDark() ? "dark" : "light";
  };

  // On paper: all figures, light, and as wide as a card on A4 or Letter is.
  const PAPER = 648, HALF_OF_PAPER = 296;
  window.addEventListener("beforeprint", () => {
    paper = true;
    turn++;
    if (window.Plotly) Object.keys(figures).forEach(draw);
  });
  window.addEventListener("afterprint", () => {
    paper = false;
    delete root.dataset.drawn;
    if (window.Plotly) Object.keys(figures).forEach((name) => Plotly.purge(placeOf(name)));  // or it keeps the width
    drawAll();
  });

  document.querySelectorAll("[data-control]").forEach((control) => {
    control.addEventListener("input", () => {
      const group = control.dataset.group;
      const together = group
        ? document.querySelectorAll(`[data-group="${CSS.escape(group)}"]`)
        : [control];
      together.forEach((each) => {
        const name = each.dataset.control;
        each.value = control.value;
        figures[name].at = Number(control.value);
        const output = each.parentElement.querySelector("output");
        if (output) output.textContent = figures[name].states[figures[name].at].label;
        if (window.Plotly) draw(name);
      });
    });
  });

  // ---- Tables ---------------------------------------------------------------------------------------------------
  const key = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.key === undefined) return cell.textContent;
    return cell.dataset.key === "" ? null : Number(cell.dataset.key);
  };
  const compare = (a, b) => {
    if (a === null || b === null) return (a === null) - (b === null);
    return typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
  };
  document.querySelectorAll("table").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, column) => head.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((each) => each.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const unknown = (row) => key(row, column) === null;
      const rows = [...body.rows].sort((a, b) => {
        if (unknown(a) || unknown(b)) return unknown(a) - unknown(b);  // always at the end
        return (up ? 1 : -1) * compare(key(a, column), key(b, column));
      });
      body.append(...rows);
    }));
  });

  const texts = (row) => [...row.cells].map((cell) => cell.textContent.trim());
  const cells = (table) => [...table.rows].map(texts);
  const numeric = (table) => [...(table.tBodies[0].rows[0] || { cells: [] }).cells].map((cell) => cell.className === "number");
  const markdown = (table) => {
    const [head, ...rows] = cells(table).map((row) => row.map((text) => text.replaceAll("\\", "\\\\").replaceAll("|", "\\|")));
    const line = (row) => `| ${row.join(" | ")} |`;
    const rule = line(numeric(table).map((right) => right ? "---:" : "---"));
    return [line(head), rule, ...rows.map(line)].join("\n") + "\n";
  };
  const special = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}",
    "±": "$\\pm$", "−": "$-$", "²": "$^2$", "–": "--" };
  const escaped = (text) => text.replace(/[\\~^±−²–&%$#_{}]/g, (sign) => special[sign] || `\\${sign}`);
  const latex = (table) => {
    const [head, ...rows] = cells(table).map((row) => row.map(escaped).join(" & ") + " \\\\");
    const columns = numeric(table).map((right) => right ? "r" : "l").join("");
    const feet = table.tFoot ? table.tFoot.rows.length : 0;
    const body = rows.slice(0, rows.length - feet), foot = rows.slice(rows.length - feet);
    return [`\\begin{tabular}{${columns}}`, "\\toprule", head, "\\midrule", ...body,
      ...(feet ? ["\\midrule", ...foot] : []), "\\bottomrule", "\\end{tabular}"].join("\n") + "\n";
  };
  // The clipboard needs a secure page, which a file is not in every browser: an older way stands in.
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      if (!done) throw new Error("the browser does not allow copying");
    }
  };
  document.querySelectorAll("[data-copy]").forEach((each) => each.addEventListener("click", async () => {
    const table = each.closest("figure").querySelector("table"), status = each.parentElement.querySelector("[role=status]");
    const text = each.dataset.copy === "latex" ? latex(table) : markdown(table);
    try {
      await copy(text);
      status.textContent = "Copied.";
    } catch (error) {
      status.textContent = `Not copied: ${error.message}.`;
    }
    each.dataset.copied = text;
    setTimeout(() => { status.textContent = ""; }, 2000);
  }));

  // ---- The drawing library is packed in this file; unpacking it needs a browser of 2023 or later -----------------
  const start = async () => {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    await drawAll();
  };
  start().catch((error) => {
    const note = document.getElementById("trouble");
    note.hidden = false;
    note.textContent = `The figures cannot be drawn in this browser (${error.message}); the numbers are in the tables.`;
  });
})();

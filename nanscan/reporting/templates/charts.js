"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const LANES = [
    ["skip", "skipped", "--skip"], ["bad", "NaN, stepped", "--bad"], ["weights", "bad weights", "--bad"],
    ["spike", "spike", "--spike"], ["rollback", "rollback", "--rollback"], ["checkpoint", "checkpoint", "--checkpoint"],
  ];
  const PANELS = [
    ["norm", "gradient norm", "--accent", 220], ["loss", "loss", "--loss", 150],
    ["clip_factor", "clip factor", "--accent", 90], ["loss_scale", "loss scale", "--limit", 90],
  ];
  const VIRIDIS = ["#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725"];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toString());
  const TIP = "max-width: min(30rem, 90vw); white-space: normal; overflow-wrap: anywhere;";
  const charts = [];

  /* ---- places and steps: several runs lie end to end on one axis ------------------------------------------------ */

  function stepAt(x) {
    let run = 0;
    while (run + 1 < data.runs.length && data.runs[run + 1].x <= x) run += 1;
    const at = data.runs[run] || { x: 0, step: 0 };
    const step = Math.round(x) - at.x + at.step;
    return data.runs.length > 1 ? "run " + (run + 1) + ", step " + step.toLocaleString("en") : "step " + step.toLocaleString("en");
  }

  function axisLabel(x) {
    return data.runs.length > 1 ? stepAt(x).replace("run ", "").replace(", step ", ": ") : Math.round(x).toLocaleString("en");
  }

  function expand(stretches, lane) {
    const points = [];
    for (const [first, count] of stretches) for (let i = 0; i < count; i += 1) points.push([first + i, lane]);
    return points;
  }

  const marks = LANES.filter(([kind]) => data.marks[kind].length);
  const points = marks.map(([kind], lane) =>
    kind === "rollback" || kind === "checkpoint" ? data.marks[kind].map(([x]) => [x, lane]) : expand(data.marks[kind], lane));
  const sorted = (list) => [...new Set(list)].sort((a, b) => a - b);
  const events = points.flatMap((list, lane) => (marks[lane][0] === "checkpoint" ? data.marks.checkpoint.filter((m) => m[2]) : list).map((p) => p[0]));
  const places = sorted(events); /* what n and p go to */
  const marked = sorted(points.flatMap((list) => list.map((p) => p[0])));

  /* ---- the steps ------------------------------------------------------------------------------------------------ */

  const box = document.getElementById("steps");
  const stepChart = box && echarts.init(box, null, { renderer: "canvas" });
  const LOGGED = ["norm", "loss", "loss_scale"].filter((name) => spread(name) > 0);
  let logScale = LOGGED.some((name) => spread(name) > 100);

  /* The largest value by the smallest; 0 where a logarithm can't show them all. */
  function spread(name) {
    const values = (data.series[name] || []).map((p) => p[1]).filter((v) => v !== null);
    if (!values.length || values.some((v) => v <= 0)) return 0;
    return values.reduce((a, b) => Math.max(a, b)) / values.reduce((a, b) => Math.min(a, b));
  }

  const logged = (name) => logScale && LOGGED.includes(name);

  function panels() {
    return PANELS.filter(([name]) => data.series[name] || (name === "clip_factor" && data.series.clip_factor));
  }

  function layout() {
    const found = [];
    let top = 34;
    const part = "paper" in document.documentElement.dataset ? 0.72 : 1; /* so that it fits under the head of the page */
    for (const [name, title, color, full] of panels()) {
      const height = Math.round(full * part);
      found.push({ name, title, color, top, height });
      top += height + 34;
      if (name === "norm" && marks.length) {
        found.push({ name: "lanes", title: "", top: top - 22, height: 20 * marks.length });
        top += 20 * marks.length + 24;
      }
    }
    return { found, height: top + 46 };
  }

  function bounds() {
    const x = (data.series.norm || []).map((p) => p[0]);
    return x.length ? [x[0], Math.max(x[x.length - 1], x[0] + 1)] : [0, 1];
  }

  function stepOption() {
    const { found } = layout();
    const [low, high] = bounds();
    const text = css("--text"), muted = css("--muted"), line = css("--line");
    const axes = found.map((_, i) => i);
    const narrow = box.clientWidth < 560;
    const left = narrow ? 78 : 100;
    return {
      animation: false,
      aria: { enabled: true },
      textStyle: { color: text },
      legend: { show: false },
      axisPointer: { link: [{ xAxisIndex: "all" }] },
      tooltip: {
        trigger: "axis", confine: true, formatter: stepTip, backgroundColor: css("--panel"), borderColor: line,
        textStyle: { color: text, fontSize: 12 }, transitionDuration: 0, extraCssText: TIP,
      },
      grid: found.map((p) => ({ left, right: 18, top: p.top, height: p.height })),
      xAxis: found.map((p, i) => ({
        type: "value", gridIndex: i, min: low, max: high, minInterval: 1,
        axisLabel: { show: i === found.length - 1, color: muted, formatter: axisLabel, hideOverlap: true, showMaxLabel: true },
        axisTick: { show: i === found.length - 1 }, axisLine: { lineStyle: { color: line }, onZero: false }, splitLine: { show: false },
        axisPointer: { label: { show: false }, lineStyle: { color: muted } },
        name: i === found.length - 1 ? (data.runs.length > 1 ? "run: step" : "step") : "", nameLocation: "middle", nameGap: 22, nameTextStyle: { color: muted },
      })),
      yAxis: found.map((p, i) => (p.name === "lanes" ? laneAxis(i, muted) : {
        type: logged(p.name) ? "log" : "value", gridIndex: i, scale: p.name === "loss",
        max: p.name === "clip_factor" ? 1 : null, min: p.name === "clip_factor" ? 0 : null, splitNumber: p.height > 100 ? 4 : 2,
        name: p.title, nameLocation: "end", nameGap: 10, nameTextStyle: { color: text, fontWeight: "bold", align: "left" },
        axisLabel: { color: muted, formatter: short, hideOverlap: true }, splitLine: { lineStyle: { color: line, opacity: 0.5 } },
        axisPointer: { show: false },
      })),
      dataZoom: [
        { type: "inside", xAxisIndex: axes, filterMode: "none", minValueSpan: 4 },
        { type: "slider", xAxisIndex: axes, filterMode: "none", minValueSpan: 4, bottom: 6, height: 18, left, right: 18, showDetail: false,
          borderColor: line, textStyle: { color: muted }, brushSelect: false, fillerColor: "rgba(100,130,200,0.18)" },
      ],
      series: found.flatMap((p, i) => (p.name === "lanes" ? laneSeries(i) : lineSeries(p, i))),
    };
  }

  function laneAxis(i, muted) {
    return {
      type: "category", gridIndex: i, inverse: true, data: marks.map((m) => m[1]), axisTick: { show: false },
      axisLine: { show: false }, axisLabel: { color: muted, interval: 0, fontSize: 11 }, axisPointer: { show: false },
    };
  }

  function laneSeries(i) {
    return marks.map(([kind, , color], lane) => ({
      type: "scatter", name: kind, xAxisIndex: i, yAxisIndex: i, data: points[lane], symbol: "rect", symbolSize: [4, 14],
      large: points[lane].length > 3000, progressive: 0, itemStyle: { color: css(color) }, tooltip: { show: false }, cursor: "pointer",
    }));
  }

  function lineSeries(p, i) {
    const values = data.series[p.name];
    const series = [{
      type: "line", name: p.name, xAxisIndex: i, yAxisIndex: i, data: values, showSymbol: values.length < 60, symbolSize: 4,
      lineStyle: { width: 1.4, color: css(p.color) }, itemStyle: { color: css(p.color) }, connectNulls: false,
      step: p.name === "loss_scale" ? "end" : false,
    }];
    if (p.name !== "norm") return series;
    if (data.marks.skip.length && data.marks.skip.length < 400) series[0].markArea = skipAreas();
    series[0].markLine = lines();
    if (data.series.clip_limit) {
      series.push({
        type: "line", name: "clip_limit", xAxisIndex: i, yAxisIndex: i, data: data.series.clip_limit, showSymbol: false,
        lineStyle: { width: 1.2, type: "dashed", color: css("--limit") }, itemStyle: { color: css("--limit") },
      });
    }
    return series;
  }

  function skipAreas() {
    return {
      silent: true, itemStyle: { color: css("--skip"), opacity: 0.22 },
      data: data.marks.skip.map(([x, n]) => [{ xAxis: x - 0.5 }, { xAxis: x + n - 0.5 }]),
    };
  }

  function lines() {
    const muted = css("--muted");
    const label = (text, color) => ({ show: true, position: "insideEndTop", formatter: text, color, fontSize: 11,
      textBorderColor: css("--bg"), textBorderWidth: 3 });
    const list = data.marks.rollback.slice(-200).map(([x]) => ({
      xAxis: x, lineStyle: { color: css("--rollback"), type: "dotted" }, label: { show: false } }));
    if (data.limit !== null && !data.series.clip_limit) {
      list.push({ yAxis: data.limit, lineStyle: { color: css("--limit"), type: "dashed" }, label: label("clip_norm " + short(data.limit), muted) });
    }
    data.runs.slice(1).forEach((run, i) => {
      if (i < 50) list.push({ xAxis: run.x, lineStyle: { color: muted, type: "solid" }, label: { show: i < 8, formatter: "run " + (i + 2), color: muted, fontSize: 11 } });
    });
    return { silent: true, symbol: "none", data: list };
  }

  function stepTip(items) {
    const list = Array.isArray(items) ? items : [items];
    const tip = document.createElement("div");
    const x = list.length ? list[0].axisValue : 0;
    add(tip, "b", stepAt(x));
    for (const item of list) {
      if (item.seriesType === "line" && item.value[1] !== null) add(tip, "div", item.seriesName.replace("_", " ") + ": " + short(item.value[1]));
    }
    const near = nearest(x, Infinity);
    if (near !== null && Math.abs(near - x) < 1) add(tip, "div", titleAt(near));
    return tip;
  }

  function add(parent, tag, text, name) {
    const element = document.createElement(tag);
    element.textContent = text;
    if (name) element.className = name;
    parent.appendChild(element);
    return element;
  }

  /* ---- events --------------------------------------------------------------------------------------------------- */

  const panel = document.getElementById("details");
  let chosen = null;

  function nearest(x, tolerance, among = places) {
    let low = 0, high = among.length;
    while (low < high) { const mid = (low + high) >> 1; if (among[mid] < x) low = mid + 1; else high = mid; }
    const near = [among[low - 1], among[low]].filter((p) => p !== undefined).sort((a, b) => Math.abs(a - x) - Math.abs(b - x))[0];
    return near !== undefined && Math.abs(near - x) <= tolerance ? near : null;
  }

  function notesAt(x) {
    return ["rollback", "checkpoint"].flatMap((kind) => data.marks[kind].filter((m) => m[0] === x).map((m) => m[1]));
  }

  function titleAt(x) {
    const detail = data.details[x];
    return detail ? detail.title : notesAt(x)[0] || "skipped";
  }

  function show(x, focus) {
    const detail = data.details[x];
    chosen = x;
    panel.hidden = false;
    panel.replaceChildren();
    const head = add(panel, "h3", "");
    add(head, "span", stepAt(x) + ": " + titleAt(x));
    const close = add(head, "button", "Close");
    close.type = "button";
    close.addEventListener("click", () => { panel.hidden = true; });
    for (const text of notesAt(x)) add(panel, "p", text);
    if (detail) describe(detail);
    else if (!notesAt(x).length) add(panel, "p", "The details of this step are not in this page; its line in the log says more.");
    if (stepChart) stepChart.dispatchAction({ type: "showTip", xAxisIndex: 0, x: stepChart.convertToPixel({ xAxisIndex: 0 }, x), y: 60 });
    if (focus) { panel.focus({ preventScroll: true }); panel.scrollIntoView({ block: "nearest" }); }
  }

  function describe(detail) {
    if (detail.nan || detail.inf) {
      add(panel, "p", detail.nan.toLocaleString("en") + " NaN, " + detail.inf.toLocaleString("en") + " Inf; action: " + detail.action);
    }
    for (const text of detail.lines || []) add(panel, "p", text);
    if (detail.rows.length) {
      const list = add(panel, "ul", "", "tensors");
      for (const text of detail.rows) add(list, "li", text);
      if (detail.more > 0) add(list, "li", "and " + detail.more + " more");
    }
    if (detail.origin) origin(detail.origin);
  }

  function origin(from) {
    const made = from.op === "input" || from.op === "parameter" ? "came in with " + from.op + " " + (from.name || "") : "made by " + from.op;
    const where = (from.module ? " in " + from.module : "") + (from.file ? " at " + from.file + (from.line ? ":" + from.line : "") : "");
    add(panel, "p", (from.kind === "inf" ? "Inf " : "NaN ") + made + (from.phase === "backward" ? " (backward)" : "") + where);
    if (from.code) add(add(panel, "pre", ""), "code", from.code);
    const list = add(panel, "ul", "", "tensors");
    for (const text of from.inputs || []) add(list, "li", "in " + text);
    for (const text of from.outputs || []) add(list, "li", "out " + text);
    if (from.note) add(panel, "p", from.note);
    if (from.hint) add(panel, "p", "Hint: " + from.hint);
  }

  function walk(direction) {
    if (!places.length) return;
    const from = chosen === null ? (direction > 0 ? -Infinity : Infinity) : chosen;
    const next = direction > 0 ? places.find((p) => p > from) : [...places].reverse().find((p) => p < from);
    if (next === undefined) return;
    bring(next);
    show(next, false);
  }

  /* ---- zoom ----------------------------------------------------------------------------------------------------- */

  function range() {
    const zoom = stepChart.getOption().dataZoom[0];
    return [zoom.startValue, zoom.endValue];
  }

  function zoomTo(a, b) {
    const [low, high] = bounds();
    const width = Math.min(Math.max(b - a, 4), high - low);
    const start = Math.min(Math.max(a, low), high - width);
    stepChart.dispatchAction({ type: "dataZoom", dataZoomIndex: 0, startValue: start, endValue: start + width });
  }

  function bring(x) {
    const [a, b] = range();
    if (x < a || x > b) zoomTo(x - (b - a) / 2, x + (b - a) / 2);
  }

  const actions = {
    left() { const [a, b] = range(); zoomTo(a - (b - a) / 4, b - (b - a) / 4); },
    right() { const [a, b] = range(); zoomTo(a + (b - a) / 4, b + (b - a) / 4); },
    in() { const [a, b] = range(); zoomTo(a + (b - a) / 4, b - (b - a) / 4); },
    out() { const [a, b] = range(); zoomTo(a - (b - a) / 2, b + (b - a) / 2); },
    all() { zoomTo(...bounds()); },
    log() { logScale = !logScale; paint(); },
    next() { walk(1); },
    previous() { walk(-1); },
  };
  const KEYS = { ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", 0: "all", n: "next", p: "previous" };

  /* ---- heat maps ------------------------------------------------------------------------------------------------ */

  function heat(chart, map, logarithmic, unit) {
    const good = [], bad = [];
    let low = Infinity, high = -Infinity;
    const cells = map.cells.flatMap((row, y) => row.map((v, x) => [x, y, v])).filter((cell) => cell[2] !== null);
    const floor = cells.reduce((a, c) => (c[2] !== "bad" && c[2] > 0 ? Math.min(a, c[2]) : a), Infinity);
    for (const [x, y, v] of cells) {
      if (v === "bad") { bad.push([x, y, 1]); continue; }
      const z = logarithmic ? Math.log10(v > 0 ? v : floor === Infinity ? 1 : floor) : v;
      low = Math.min(low, z); high = Math.max(high, z);
      good.push([x, y, z, v]);
    }
    if (!good.length) { low = 0; high = 1; }
    const width = chart.getDom().clientWidth, left = Math.min(230, Math.round(width * 0.3));
    const muted = css("--muted"), line = css("--line");
    chart.resize({ height: Math.max(150, map.rows.length * 15 + 92) });
    chart.setOption({
      animation: false,
      aria: { enabled: true },
      textStyle: { color: css("--text") },
      grid: { left, right: 12, top: 8, bottom: 84 },
      xAxis: { type: "category", data: map.columns.map(axisLabel), axisLabel: { color: muted, hideOverlap: true }, axisTick: { show: false }, axisLine: { lineStyle: { color: line } } },
      yAxis: { type: "category", inverse: true, data: map.rows, axisLabel: { color: muted, width: left - 14, overflow: "truncate", fontSize: 11 }, axisTick: { show: false }, axisLine: { show: false } },
      tooltip: { confine: true, backgroundColor: css("--panel"), borderColor: line, textStyle: { color: css("--text"), fontSize: 12 }, transitionDuration: 0, extraCssText: TIP,
        formatter: (item) => {
          const tip = document.createElement("div");
          add(tip, "b", map.rows[item.value[1]]);
          add(tip, "div", stepAt(map.columns[item.value[0]]));
          add(tip, "div", item.seriesName === "bad" ? "NaN or Inf" : unit + " " + short(item.value[3]));
          return tip;
        } },
      visualMap: { type: "continuous", seriesIndex: 0, min: low, max: high > low ? high : low + 1, dimension: 2, orient: "horizontal", left, bottom: 28, itemHeight: Math.min(160, width / 3),
        itemWidth: 12, inRange: { color: VIRIDIS }, textStyle: { color: muted }, calculable: false,
        text: [short(logarithmic ? 10 ** high : high), short(logarithmic ? 10 ** low : low)] },
      dataZoom: [{ type: "inside", xAxisIndex: 0, filterMode: "none" }, { type: "slider", xAxisIndex: 0, bottom: 4, height: 14, left, right: 12, showDetail: false, filterMode: "none", borderColor: line, brushSelect: false }],
      series: [
        { type: "heatmap", name: "good", data: good, progressive: 0, emphasis: { disabled: true } },
        { type: "heatmap", name: "bad", data: bad, itemStyle: { color: css("--skip") }, progressive: 0, emphasis: { disabled: true } },
      ],
    }, true);
  }

  /* The arrow keys go from cell to cell of a heat map; what is there is shown, and said to a screen reader. */
  const KEYED = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  function keyed(chart, map) {
    const dom = chart.getDom();
    let at = null;
    dom.addEventListener("keydown", (event) => {
      const by = KEYED[event.key], shown = map();
      if (!by || event.ctrlKey || event.metaKey || event.altKey || !shown) return;
      event.preventDefault();
      const inside = (value, count) => Math.min(Math.max(value, 0), count - 1);
      at = at === null ? [0, 0] : [inside(at[0] + by[0], shown.columns.length), inside(at[1] + by[1], shown.rows.length)];
      at = [inside(at[0], shown.columns.length), inside(at[1], shown.rows.length)];
      const value = shown.cells[at[1]][at[0]], text = value === null ? "nothing noted" : value === "bad" ? "NaN or Inf" : short(value);
      document.getElementById("cell").textContent = shown.rows[at[1]] + ", " + stepAt(shown.columns[at[0]]) + ": " + text;
      const series = chart.getOption().series, name = value === "bad" ? 1 : 0;
      const index = series[name].data.findIndex((cell) => cell[0] === at[0] && cell[1] === at[1]);
      chart.dispatchAction(index < 0 ? { type: "hideTip" } : { type: "showTip", seriesIndex: name, dataIndex: index });
    });
    dom.addEventListener("blur", () => chart.dispatchAction({ type: "hideTip" }));
  }

  const layerChart = data.layers && echarts.init(document.getElementById("layers"));
  const rangeKind = document.getElementById("range-kind"), rangeQuantity = document.getElementById("range-quantity");
  const rangeChart = rangeKind && echarts.init(document.getElementById("ranges"));
  const WORDS = { absmax: "largest magnitude", rms: "root mean square", zero_fraction: "share of zeros", underflow_fraction: "share that underflows in float16" };

  function fill(select, values) {
    for (const value of values) { const option = add(select, "option", WORDS[value] || value); option.value = value; }
    select.addEventListener("change", paintRanges);
  }

  function paintRanges() {
    const quantity = rangeQuantity.value, map = (data.ranges[rangeKind.value] || {})[quantity];
    if (map) heat(rangeChart, map, !quantity.endsWith("fraction"), WORDS[quantity]);
    else rangeChart.clear();
  }

  /* ---- all of it ------------------------------------------------------------------------------------------------ */

  function paint() {
    if (stepChart) {
      const zoom = stepChart.getOption() && stepChart.getOption().dataZoom ? range() : null;
      stepChart.resize({ height: layout().height });
      stepChart.setOption(stepOption(), true);
      if (zoom) zoomTo(...zoom);
      const button = document.getElementById("log-scale");
      button.disabled = !LOGGED.length;
      button.setAttribute("aria-pressed", String(logScale));
    }
    if (layerChart) heat(layerChart, data.layers, true, "norm");
    if (rangeChart) paintRanges();
    for (const chart of charts) chart.getZr().flush();
  }

  /* Browsers print a canvas by repeating how it was drawn, up to a limit that a heat map exceeds: print a copy. */
  function toPaper() {
    document.documentElement.dataset.paper = "";
    for (const chart of charts) chart.resize({ width: 900 });
    paint();
    for (const chart of charts) {
      const drawn = chart.renderToCanvas({ pixelRatio: 2, backgroundColor: "#fff" });
      const copy = document.createElement("canvas");
      copy.className = "paper";
      copy.width = drawn.width;
      copy.height = drawn.height;
      copy.getContext("2d").drawImage(drawn, 0, 0);
      chart.getDom().after(copy);
    }
  }

  function fromPaper() {
    delete document.documentElement.dataset.paper;
    document.querySelectorAll("canvas.paper").forEach((copy) => copy.remove());
    for (const chart of charts) chart.resize({ width: "auto" });
    paint();
  }

  if (stepChart) {
    charts.push(stepChart);
    stepChart.getZr().on("click", (event) => {
      const at = stepChart.convertFromPixel({ gridIndex: 0 }, [event.offsetX, event.offsetY]);
      const [a, b] = range();
      const reach = ((b - a) * 8) / Math.max(1, box.clientWidth - 120) + 0.5;
      const near = at && (nearest(at[0], reach) ?? nearest(at[0], reach, marked));
      if (near !== null && near !== undefined) show(near, true);
    });
    box.addEventListener("keydown", (event) => {
      const action = KEYS[event.key];
      if (action && !event.ctrlKey && !event.metaKey && !event.altKey) { actions[action](); event.preventDefault(); }
    });
    document.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", () => actions[button.dataset.do]()));
  }
  document.querySelectorAll("[data-x]").forEach((button) => button.addEventListener("click", () => {
    const x = Number(button.dataset.x);
    if (stepChart) bring(x);
    show(x, true);
  }));
  if (layerChart) {
    charts.push(layerChart);
    keyed(layerChart, () => data.layers);
  }
  if (rangeChart) {
    charts.push(rangeChart);
    keyed(rangeChart, () => (data.ranges[rangeKind.value] || {})[rangeQuantity.value]);
    fill(rangeKind, Object.keys(data.ranges));
    fill(rangeQuantity, Object.keys(Object.values(data.ranges)[0]));
  }
  paint();
  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { if ("paper" in document.documentElement.dataset) return; for (const chart of charts) chart.resize({ width: "auto" }); paint(); }, 120);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  window.addEventListener("beforeprint", toPaper);
  window.addEventListener("afterprint", fromPaper);
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();

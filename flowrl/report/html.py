"""The frame and the style of report.html: one file, no script, nothing fetched; light and dark.
Imports nothing of ours."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title><style>{style}</style></head>
<body><main>
{body}
</main></body></html>
"""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --panel: #f6f7f9; --ink: #1c2128; --faint: #667080; --rule: #e1e5ea; --good: #14804a;
  --bad: #c4353a; --s0: #2f6fde; --s1: #1a936f; --s2: #d97a21; --s3: #9a56c4; --s4: #cf4a63; --s5: #1b98b3; --s6: #b0921a; --s7: #97a1ad; }
@media (prefers-color-scheme: dark) { :root { --paper: #12161c; --panel: #1a2029; --ink: #e4e8ee; --faint: #93a0b0; --rule: #2c3541;
  --good: #4cc38a; --bad: #f2777a; --s0: #6ba1ff; --s1: #44c49b; --s2: #f0a35a; --s3: #c48ae6; --s4: #f0809a; --s5: #55c5dd; --s6: #d8bd55;
  --s7: #77828f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 34px; line-height: 1.15; margin: 4px 0 16px; letter-spacing: -0.02em; overflow-wrap: anywhere; }
h2 { font-size: 21px; margin: 0 0 16px; letter-spacing: -0.01em; }
h3 { font-size: 14px; margin: 28px 0 10px; color: var(--faint); font-weight: 600; }
section { border-top: 1px solid var(--rule); margin-top: 36px; padding-top: 28px; }
.kind { margin: 0; color: var(--faint); font-size: 14px; }
.chips { display: flex; flex-wrap: wrap; gap: 8px; list-style: none; margin: 0; padding: 0; font-size: 14px; }
.chips li { background: var(--panel); border: 1px solid var(--rule); border-radius: 999px; padding: 3px 12px; }
.chips span { color: var(--faint); margin-right: 6px; }
.headline { display: flex; gap: 28px; align-items: center; margin-bottom: 16px; }
.headline strong { font-size: 58px; line-height: 1; letter-spacing: -0.03em; font-variant-numeric: tabular-nums; }
.headline b { font-size: 19px; } .headline p { margin: 2px 0 0; color: var(--faint); }
.good { color: var(--good); } .bad { color: var(--bad); }
.note, .missing { background: var(--panel); border-left: 3px solid var(--s7); padding: 10px 14px; color: var(--faint); margin: 12px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 8px 12px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--faint); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
tbody tr:last-child td { border-bottom: 0; } .result tbody tr:last-child { font-weight: 650; }
@media (min-width: 641px) { .even { table-layout: fixed; } }
small { display: block; color: var(--faint); font-size: 12px; font-weight: 400; }
.foot { margin: 10px 0 0; padding: 0 12px; list-style: none; color: var(--faint); font-size: 14px; }
figure { margin: 16px 0; } figcaption { color: var(--faint); font-size: 14px; margin-top: 8px; }
img { max-width: 100%; height: auto; display: block; border: 1px solid var(--rule); border-radius: 8px; background: #fff; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(310px, 1fr)); gap: 16px; }
.chart { width: 100%; height: auto; display: block; } .charts .chart { background: var(--panel); border-radius: 8px; padding: 6px; }
.chart.wide { max-width: 760px; }
.chart text { font: 11px system-ui, sans-serif; fill: var(--faint); font-variant-numeric: tabular-nums; }
.chart .name { font-size: 12.5px; font-weight: 600; fill: var(--ink); } .chart .label { font-size: 13px; fill: var(--ink); }
.chart .value { font-size: 12px; fill: var(--ink); } .chart .rule { stroke: var(--rule); stroke-width: 1; }
.chart path { fill: none; stroke-linejoin: round; stroke-linecap: round; } .chart .line { stroke-width: 2.2; }
.chart .raw { stroke-width: 1; opacity: 0.35; } .chart .hit { fill: transparent; }
.bar { display: flex; height: 30px; border-radius: 6px; overflow: hidden; gap: 2px; } .bar span { min-width: 1px; }
.legend { list-style: none; padding: 0; margin: 12px 0 0; display: grid; gap: 4px 28px; font-size: 14px;
  grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); font-variant-numeric: tabular-nums; }
.legend li { display: flex; align-items: center; gap: 8px; } .legend i { width: 11px; height: 11px; border-radius: 3px; }
.legend b { margin-left: auto; font-weight: 600; }
.legend em { color: var(--faint); font-style: normal; min-width: 84px; text-align: right; }
pre { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; padding: 14px 16px; overflow-x: auto; font-size: 13px; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; } summary { cursor: pointer; color: var(--faint); }
.env { display: grid; grid-template-columns: max-content 1fr; gap: 2px 24px; font-size: 14px; margin: 0; }
.env dt { color: var(--faint); } .env dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 640px) { .headline { flex-wrap: wrap; } }
@media print { section { break-inside: avoid; } }
"""

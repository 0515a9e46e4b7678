#include "apps/report/page_style.h"

namespace moesaic::apps::report {

// Runs: eight hues told apart by people with colour-blindness, darker on white, lighter on black. Loads: blue below the
// mean, the page's own grey at it, red above it, so that the mean recedes in both schemes.
const char* const kPageStyle = R"css(
:root { color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --edge: #dcdcd8; --text: #1d1d1b; --faint: #5f5f5a; --grid: #e9e9e5;
  --c0: #0b62b8; --c1: #c8500a; --c2: #00795a; --c3: #a5348c; --c4: #8a6a00; --c5: #1387a8; --c6: #c02438; --c7: #5b4bc4;
  --h0: #123f86; --h1: #2159a9; --h2: #3f78c3; --h3: #6b9ad4; --h4: #9dbde2; --h5: #cbdbec; --h6: #ededea;
  --h7: #f3d6c8; --h8: #edb299; --h9: #e0886b; --h10: #cd5d45; --h11: #ae3529; --h12: #86131a; --dead: #111111; }
@media (prefers-color-scheme: dark) { :root {
  --page: #141416; --card: #1d1d20; --edge: #37373c; --text: #ececea; --faint: #a3a39e; --grid: #2d2d31;
  --c0: #64adff; --c1: #ff9a52; --c2: #3fcf9f; --c3: #ee8bd6; --c4: #e0c04a; --c5: #5fd0ee; --c6: #ff7b87; --c7: #aca0ff;
  --h0: #a9cdff; --h1: #86b6f8; --h2: #659de6; --h3: #4a82c9; --h4: #3b689f; --h5: #354d6c; --h6: #3a3a3e;
  --h7: #624038; --h8: #8d4c3d; --h9: #b85e47; --h10: #dd7a5c; --h11: #f49c7f; --h12: #ffc5b0; --dead: #f4f000; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.45 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1400px; margin: 0 auto; padding: 20px 24px 48px; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 32px 0 10px; }
.runs { display: flex; flex-wrap: wrap; gap: 4px 22px; position: sticky; top: 0; padding: 8px 0; margin: 0; list-style: none;
  background: var(--page); z-index: 1; border-bottom: 1px solid var(--edge); }
.runs li { overflow-wrap: anywhere; }
.runs i { display: inline-block; width: 22px; height: 0; border-top: 4px solid var(--run); margin-right: 8px; vertical-align: middle; }
.runs .again i { border-top-style: dashed; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 540px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 12px 14px 10px; background: var(--card); border: 1px solid var(--edge); border-radius: 8px; min-width: 0; }
figure.wide { margin-top: 16px; }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
.note { margin: 2px 0 0; color: var(--faint); font-size: 13px; }
svg { display: block; width: 100%; height: auto; }
.small { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px 14px; margin: 8px 0; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 12px; border-bottom: 1px solid var(--grid); vertical-align: top; overflow-wrap: anywhere; min-width: 7em; }
tr:last-child td, tr:last-child th { border-bottom: 0; }
tbody th { font-weight: 400; color: var(--faint); overflow-wrap: normal; }
pre { margin: 0; padding: 10px 14px; overflow-x: auto; font-size: 13px; }
details { margin-top: 8px; background: var(--card); border: 1px solid var(--edge); border-radius: 8px; }
summary { padding: 8px 14px; cursor: pointer; overflow-wrap: anywhere; }
.r0 { --run: var(--c0); } .r1 { --run: var(--c1); } .r2 { --run: var(--c2); } .r3 { --run: var(--c3); }
.r4 { --run: var(--c4); } .r5 { --run: var(--c5); } .r6 { --run: var(--c6); } .r7 { --run: var(--c7); }
svg text { font-family: inherit; } .tick { font-size: 12px; fill: var(--faint); } .label { font-size: 12.5px; fill: var(--faint); }
.halo { font-size: 12px; fill: var(--text); paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.grid { stroke: var(--grid); } .axis { stroke: var(--faint); } .level { stroke: var(--text); stroke-dasharray: 5 4; opacity: .75; }
.grid, .axis, .level, .raw, .smooth, .dashed, .dots, .skip, .resume { fill: none; }
.raw, .smooth, .dashed, .dots { stroke: var(--run); stroke-linecap: round; stroke-linejoin: round; }
.raw { stroke-width: 1.1; opacity: .38; } .smooth { stroke-width: 2.1; } .dashed { stroke-width: 1.8; stroke-dasharray: 5 5; }
.again .smooth, .again .dots { stroke-dasharray: 9 5; }
.dots { stroke-width: 1; stroke-dasharray: 2 4; } circle { fill: var(--card); stroke: var(--run); stroke-width: 2; }
.save { fill: var(--run); } .resume { stroke: var(--run); stroke-width: 1.4; stroke-dasharray: 1.5 4; } .skip { stroke: var(--run); stroke-width: 2; }
.part { fill: var(--run); stroke: var(--card); stroke-width: .6; }
.key { margin: 4px 0 0; font-size: 13px; } .key span { margin-right: 14px; white-space: nowrap; }
.key i { display: inline-block; width: 11px; height: 11px; background: var(--run); margin-right: 5px; }
.area { fill: var(--run); opacity: .8; }
.heat path { fill: none; stroke-width: 1.02; shape-rendering: crispEdges; }
@media print { .runs { position: static; } figure { break-inside: avoid; } }
)css";

}  // namespace moesaic::apps::report

"""Style: how the page of a report looks, on a desk and on a phone, in the light and in the dark.

One sheet, without anything from elsewhere: no font, no image. Colours are variables, given twice; those of
series keep a contrast of 3 to 1 or better to the ground, and differ in lightness too.
"""

from typing import Final

_LIGHT: Final = """
  --ground: #ffffff; --raised: #f5f7f9; --ink: #1a2027; --quiet: #56616d; --rule: #d7dde3; --faint: #e8ecf0;
  --link: #1d5fbf; --warn: #a0460a; --warn-ground: #fdf3ea;
  --c1: #2467c8; --c2: #15803d; --c3: #c2570c; --c4: #7c3aad; --c5: #be2436; --c6: #0b7a86; --c7: #8a6a10;
  --c8: #6b7580;
"""
_DARK: Final = """
  --ground: #12161a; --raised: #1a2026; --ink: #e4e8ec; --quiet: #98a3af; --rule: #333c45; --faint: #232a31;
  --link: #79b0ff; --warn: #f0a468; --warn-ground: #2a2019;
  --c1: #6aa6ff; --c2: #4cc27c; --c3: #f2954a; --c4: #b98bf2; --c5: #f4737f; --c6: #42bccb; --c7: #d8b84a;
  --c8: #8f9ba7;
"""

_SERIES: Final = "".join(f".c{n} {{ color: var(--c{n}); }}\n" for n in range(1, 9))

CSS: Final = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
@media print {{ :root {{ {_LIGHT} }} details > * {{ display: none; }} .queue {{ break-inside: avoid; }} }}
* {{ box-sizing: border-box; }}
html {{ -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }}
@media (prefers-reduced-motion: reduce) {{ html {{ scroll-behavior: auto; }} }}
body {{
  margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
}}
main, header, footer {{ max-width: 78rem; margin: 0 auto; padding: 0 1.25rem; }}
header {{ padding-top: 2rem; }}
footer {{ padding-top: 1.5rem; padding-bottom: 3rem; color: var(--quiet); font-size: .87rem; }}
h1 {{ font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; letter-spacing: -.01em; }}
h2 {{ font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: .5rem; letter-spacing: -.005em; }}
h3 {{ font-size: 1.05rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }}
p {{ margin: .4rem 0 .8rem; max-width: 50rem; }}
a {{ color: var(--link); }}
small, .quiet {{ color: var(--quiet); }}
code {{ font: .92em ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }}
.skip {{ position: absolute; left: -99rem; }}
.skip:focus {{ left: 1rem; top: .5rem; background: var(--ground); padding: .3rem .6rem; z-index: 2; }}
nav ul {{ list-style: none; margin: 1rem 0 0; padding: 0; display: flex; flex-wrap: wrap;
  gap: .25rem 1.2rem; }}

.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem;
  margin: 1.4rem 0 0; padding: 0; list-style: none; }}
.tiles li {{ background: var(--raised); border-radius: .5rem; padding: .7rem .9rem; min-width: 0; }}
.tiles b {{ display: block; font-size: 1.5rem; line-height: 1.25; font-weight: 600;
  font-variant-numeric: tabular-nums; letter-spacing: -.01em; overflow-wrap: anywhere; }}
.tiles span {{ display: block; font-size: .87rem; color: var(--quiet); overflow-wrap: anywhere; }}

.found {{ list-style: none; margin: 0; padding: 0; max-width: 60rem; }}
.found li {{ padding: .45rem .8rem; margin: 0 0 .35rem; background: var(--warn-ground);
  border-left: 3px solid var(--warn); border-radius: 0 .3rem .3rem 0; overflow-wrap: anywhere; }}
.note {{ background: var(--raised); border-radius: .5rem; padding: .8rem 1rem; max-width: 60rem; }}

.scroll {{ overflow-x: auto; margin: 0 0 1rem; border: 1px solid var(--rule); border-radius: .5rem; }}
:focus-visible {{ outline: 2px solid var(--link); outline-offset: 2px; }}
table {{ border-collapse: separate; border-spacing: 0; width: 100%; font-size: .9rem; }}
caption {{ caption-side: top; text-align: left; padding: .6rem 0; color: var(--quiet); font-size: .87rem; }}
caption span {{ position: sticky; left: 0; display: inline-block; padding: 0 .7rem;
  max-width: min(60rem, calc(100vw - 2.2rem)); }}
th, td {{ padding: .38rem .7rem; text-align: left; vertical-align: top; border-top: 1px solid var(--faint); }}
thead th {{ font-weight: 600; font-size: .82rem; color: var(--quiet); vertical-align: bottom;
  white-space: nowrap; }}
tbody th {{ font-weight: 500; }}
tbody th, tfoot th {{ position: sticky; left: 0; background: var(--ground); }}
tbody th, td.text {{ min-width: 9rem; max-width: 24rem; overflow-wrap: anywhere; }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
.zero {{ color: var(--quiet); opacity: .65; }}
.bad {{ color: var(--c5); font-weight: 600; }}
tfoot th, tfoot td {{ border-top: 2px solid var(--rule); font-weight: 600; }}
.spark {{ display: block; width: 8rem; height: 1.5rem; }}

.queue {{ border-top: 1px solid var(--rule); margin-top: 1.6rem; }}
.pair {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 29rem), 1fr));
  gap: 1.2rem 2rem; }}
.chart {{ margin: 0; min-width: 0; }}
figcaption {{ font-weight: 600; font-size: .9rem; margin: .2rem 0 .7rem; }}
figcaption small {{ font-weight: 400; font-size: .82rem; margin-left: .25rem; }}
.plot {{ display: grid; grid-template-columns: 3.6rem 1fr; grid-template-rows: 9.5rem 1.4rem; }}
.plot svg {{ width: 100%; height: 100%; display: block; overflow: visible; }}
.y, .x {{ position: relative; color: var(--quiet); font-size: .75rem; font-variant-numeric: tabular-nums; }}
.y span {{ position: absolute; right: .5rem; transform: translateY(-50%); white-space: nowrap; }}
.x span {{ position: absolute; top: .3rem; transform: translateX(-50%); white-space: nowrap; }}
.plot .x {{ grid-column: 2; }}
svg .grid {{ stroke: var(--faint); stroke-width: 1; vector-effect: non-scaling-stroke; fill: none; }}
svg .line {{ fill: none; stroke: currentColor; stroke-width: 1.6; vector-effect: non-scaling-stroke;
  stroke-linejoin: round; }}
svg .area {{ fill: currentColor; stroke: none; opacity: .14; }}
svg .bar {{ fill: currentColor; stroke: none; }}
svg .hint {{ fill: transparent; stroke: none; }}
svg .hint:hover {{ fill: var(--quiet); fill-opacity: .14; }}
.legend {{ list-style: none; margin: .45rem 0 0; padding: 0 0 0 3.6rem; display: flex; flex-wrap: wrap;
  gap: .1rem 1.1rem; font-size: .82rem; color: var(--quiet); }}
.legend b {{ color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }}
.legend i {{ display: inline-block; width: .75rem; height: .75rem; border-radius: .18rem; margin-right: .4rem;
  background: currentColor; vertical-align: -.06rem; }}
.ranks .legend, .shares .legend {{ padding-left: 0; }}
.rows {{ list-style: none; margin: 0; padding: 0; }}
.rows li {{ margin: 0 0 .55rem; }}
.rows svg {{ display: block; width: 100%; height: .9rem; background: var(--raised); border-radius: .2rem; }}
.rows .name {{ font-size: .87rem; overflow-wrap: anywhere; }}
.rows .said {{ display: block; font-size: .8rem; color: var(--quiet); font-variant-numeric: tabular-nums; }}
.ranks .x {{ height: 1.3rem; margin-top: -.3rem; }}
.ranks .x span:first-child {{ transform: none; }}
.ranks .x span:last-child:not(:first-child) {{ transform: translateX(-100%); }}
.p50 {{ fill: var(--c1); color: var(--c1); }}
.p90 {{ fill: var(--c1); color: var(--c1); opacity: .55; }}
.p99 {{ fill: var(--c1); color: var(--c1); opacity: .3; }}
.pmax {{ fill: var(--quiet); color: var(--quiet); opacity: .6; }}
details {{ margin: 1rem 0 0; }}
summary {{ cursor: pointer; color: var(--link); font-size: .9rem; }}
details .scroll {{ margin-top: .6rem; max-height: 26rem; overflow-y: auto; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; max-width: 60rem;
  margin: .6rem 0 1rem; }}
dt {{ font-weight: 600; }}
dd {{ margin: 0; }}
{_SERIES}
@media (max-width: 40rem) {{
  main, header, footer {{ padding-left: 1rem; padding-right: 1rem; }}
  header {{ padding-top: 1.3rem; }}
  h1 {{ font-size: 1.4rem; }}
  .tiles {{ grid-template-columns: 1fr 1fr; gap: .5rem; }}
  .tiles b {{ font-size: 1.25rem; }}
  .plot {{ grid-template-columns: 3rem 1fr; }}
  .legend {{ padding-left: 0; }}
  dl {{ grid-template-columns: 1fr; gap: 0; }}
  dd {{ margin-bottom: .6rem; }}
}}
"""

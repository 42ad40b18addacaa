"""The HTML frame of a run's report, as a `string.Template`: no script, no request, light and dark."""

from string import Template

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark;
  --ground: #f6f7f9; --card: #ffffff; --ink: #20242c; --soft: #667080; --line: #e3e6eb; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14161a; --card: #1d2026; --ink: #e8eaee; --soft: #9aa3b2; --line: #2c313a; }
}
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { margin: 0; font-size: 28px; line-height: 1.2; letter-spacing: -0.01em; }
.summary { margin: 6px 0 28px; color: var(--soft); }
table, figure { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
table { border-collapse: separate; border-spacing: 0; margin-bottom: 24px; min-width: min(100%, 480px); }
th, td { padding: 9px 18px; text-align: right; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; }
thead th, thead td { color: var(--soft); font-size: 13px; }
tbody th, tbody td { border-top: 1px solid var(--line); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 20px; }
figure { margin: 0; padding: 16px 18px 8px; }
figcaption { font-weight: 600; margin-bottom: 4px; }
figcaption span { margin-left: 6px; color: var(--soft); font-size: 13px; font-weight: 400; }
figure svg { display: block; width: 100%; height: auto; color: var(--soft); font-family: inherit; }
</style>
</head>
<body>
<main>
<h1>$title</h1>
<p class="summary">$summary</p>
$table
<div class="cards">
$cards</div>
</main>
</body>
</html>
""")

"""Chat templates that a model may come with: each would crash, never end or take all memory."""

from __future__ import annotations

HOSTILE = {
    "brackets": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "negations": "{{ " + "not " * 100_000 + "1 }}",
    "signs": "{{ " + "-" * 100_000 + "1 }}",
    "a chain": "{{ " + "1 + " * 100_000 + "1 }}",
    "filters": "{{ x" + " | upper" * 100_000 + " }}",
    "members": "{{ x" + ".a" * 100_000 + " }}",
    "blocks": "{% if 1 %}" * 40_000 + "{% endif %}" * 40_000,
    "branches": "{% if 0 %}" + "{% elif 0 %}" * 40_000 + "{% endif %}",
    "lists": "{{ " + "[" * 100_000 + "]" * 100_000 + " }}",
    "a macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "a long list": "{{ range(100000000000) }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}{{ n.x }}",
    "repetition": "{{ 'x' * 100000000000 }}",
    "lists in lists": "{% set n = namespace(x=[]) %}{% for i in range(100000) %}"
    "{% set n.x = [n.x] %}{% endfor %}",
    "tuples in tuples": "{% set n = namespace(x=[]) %}{% for i in range(100000) %}"
    "{% set n.x = (n.x, 1) %}{% endfor %}",
    "a list in itself": "{% set x = [] %}{% set y = x.append(x) %}{{ x | tojson }}",
    "lists in each other": "{% set x = [] %}{% set y = [x] %}{% set z = x.append(y) %}{{ x }}",
    "unfinished": "{% for m in messages %}",
    "unknown": "{% frobnicate %}",
    "empty": "",
    "huge": "x" * 2_000_000,
}

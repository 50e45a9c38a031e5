"""Reports: what happened in the queues over a time, counted from the events by Spark, as a page and tables.

    period.py     which time, and into how many pieces it is cut
    survey.py     which queues there are, and how far their events can be read
    job.py        the Spark job: events in, small tables out
    measures.py   what it counts and measures, as functions from frames to frames
    tables.py     the tables: names, columns, and how they are kept as Parquet files
    figures.py    the tables put together for each queue
    findings.py   what stands out, in sentences
    page.py       the page, one HTML file (page_parts.py, page_queue.py: its parts)
    charts.py     charts as SVG; markup.py and style.py: tags, CSS

Only job.py and measures.py need the extra `spark`; all others can be imported without it.
"""

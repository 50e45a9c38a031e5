"""Reports: what happened in the queues over a time, counted from the events by Spark, as a page and tables.

    period.py    which time, and into how many pieces it is cut
    survey.py    which queues there are, and how far their events can be read
    job.py       the Spark job: events in, small tables out
    tables.py    these tables: names, columns, and how they are kept as Parquet files
    figures.py   the tables as the page needs them
    charts.py    charts as SVG
    page.py      the page, one HTML file that needs nothing else

Importing the package needs no extra; the job needs `penstock[spark]`.
"""

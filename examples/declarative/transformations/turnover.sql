CREATE MATERIALIZED VIEW turnover
COMMENT 'Orders of each region, and what they come to'
AS SELECT region, count(*) AS orders, sum(amount) AS amount
FROM orders
GROUP BY region;

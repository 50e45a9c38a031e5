"""Orders something: tasks one after the other, tasks side by side, and one for later."""

from celery import chain, group
from shop import invoice, pay, remind

print(chain(pay.s(1, 9.5), invoice.s(1)).apply_async().get(timeout=60))
print(sum(group(pay.s(order, 10.0) for order in range(2, 12)).apply_async().get(timeout=60)))
print(remind.apply_async([1], countdown=2).get(timeout=60))

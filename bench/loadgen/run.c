/* The loop, and when a run is over.
 *
 * The clock runs from the moment when all connections stand until
 *
 *     produces              every message is confirmed, on wires that confirm; on others, in a run that does
 *                           not consume, until each producer has had an answer to a probe: a question
 *                           behind its last message, so that the server has taken in everything before it
 *     consumes              every message has arrived
 *     requests              every message is answered
 *     first                 one message has arrived
 *     idles                 all connections stand: here the clock runs from the first one
 *
 * Then, with the clock stopped, that all of it was really acknowledged is proved: by the server's answers
 * where it gives some; by asking it what is left where that can be asked; on others by ending all connections,
 * waiting until the server has ended them too, and then sending one more message: everything that was not settled
 * would come again before it. Where each message has a queue of its own this is done for the last one only.
 */

#include "loadgen.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum {
    RECEIVE_BYTES = 256 * 1024,
    OUT_BYTES = 128 * 1024, /* as much is made ready for one producer at a time */
    EVENTS_MAX = 256,
    WAIT_MS = 100,
    SPIN_NS = 60 * 1000, /* paced: this long before a message is due the loop stops sleeping */
};

static struct {
    uint64_t total;      /* messages in all */
    uint64_t next;       /* the number of the next message to send */
    uint64_t asked;      /* by consumers that ask for each message */
    uint64_t next_confirmed;
    uint64_t acknowledged;
    unsigned probes_answered;
    struct seen arrived, confirmed, answered;
    uint16_t *producer_of; /* by message, where producers are bounded */
    uint64_t *latencies_ns, *delays_ns;
    uint64_t start_ns, deadline_ns, now_ns;
    struct connection *producers, *consumers;
    unsigned producers_count, consumers_count;
    int epoll, timer;
} run;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + now.tv_nsec;
}

/* --- all connections -------------------------------------------------------------------------------- */

static void open_all(unsigned producers_count, unsigned consumers_count)
{
    run.producers_count = producers_count;
    run.consumers_count = consumers_count;
    run.producers = allocate(producers_count + 1, sizeof *run.producers);
    run.consumers = allocate(consumers_count + 1, sizeof *run.consumers);
    for (unsigned i = 0; i < consumers_count; i++)
        open_connection(&run.consumers[i], i, false, run.epoll);
    for (unsigned i = 0; i < producers_count; i++)
        open_connection(&run.producers[i], i, true, run.epoll);
}

static void receive(struct connection *connection)
{
    struct buffer *in = &connection->in;
    uint8_t *at = room_for(in, RECEIVE_BYTES);
    ssize_t got = recv(connection->fd, at, in->capacity - in->end, 0);
    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0)
        die("%s %u: %s", side(connection), connection->number,
            got ? strerror(errno) : "the server has closed the connection");
    run.now_ns = now_ns();
    in->end += got;
    in->start += settings.wire->read(connection, in->bytes + in->start, in->end - in->start);
    if (in->start == in->end)
        in->start = in->end = 0;
}

/* --- what a wire tells ------------------------------------------------------------------------------ */

static uint64_t due_ns(uint64_t number)
{
    return run.start_ns + (uint64_t)(number * 1e9 / settings.rate_per_second);
}

static void landed(uint64_t number)
{
    if (run.producer_of && number < settings.messages)
        run.producers[run.producer_of[number]].in_flight--;
}

void arrived(struct connection *connection, const uint8_t *payload, size_t length)
{
    uint64_t number = proof_check(payload, length);
    if (connection->is_producer) {
        run.probes_answered++;
        return;
    }
    see(&run.arrived, number);
    if (!settings.mode->requests)
        landed(number);
    if (run.latencies_ns && number < settings.messages)
        run.latencies_ns[number] = run.now_ns - due_ns(number);
}

void confirmed(struct connection *connection, uint64_t number)
{
    see(&run.confirmed, number);
    connection->unconfirmed--;
}

void confirmed_next(struct connection *connection)
{
    confirmed(connection, run.next_confirmed++);
}

void acknowledged(uint64_t count)
{
    run.acknowledged += count;
    if (!count)
        die("the server does not know a message that it has sent");
}

void answered(uint64_t number, const uint8_t *payload, size_t length)
{
    if (proof_check(payload, length) != number)
        die("request %" PRIu64 " was given the answer of another one", number);
    see(&run.answered, number);
    landed(number);
}

bool may_ask(void)
{
    if (run.asked >= run.total)
        return false;
    run.asked++;
    return true;
}

bool is_more_to_come(void)
{
    return run.arrived.count < run.total;
}

/* --- the loop --------------------------------------------------------------------------------------- */

/* Makes ready what may be sent now. True where there is more than goes out in one go. */
static bool top_up(struct connection *producer)
{
    while (run.next < run.total) {
        if (producer->out.end - producer->out.start >= OUT_BYTES)
            return true;
        if (settings.in_flight_max && producer->in_flight >= settings.in_flight_max)
            break;
        if (settings.wire->confirms && producer->unconfirmed >= settings.unconfirmed_max)
            break;
        if (run.delays_ns && run.next < settings.messages) {
            uint64_t now = now_ns(), due = due_ns(run.next);
            if (now < due)
                break;
            run.delays_ns[run.next] = now - due;
        }
        if (run.producer_of && run.next < settings.messages)
            run.producer_of[run.next] = producer->number;
        producer->in_flight++;
        producer->unconfirmed++;
        settings.wire->send(producer, run.next++);
    }
    bool is_probing = settings.wire->probe && !settings.mode->consumes;
    if (is_probing && run.next == run.total && !producer->is_probed) {
        producer->is_probed = true;
        settings.wire->probe(producer);
    }
    return false;
}

/* Has the loop woken in time for the next message that is due. True where it is so near that to sleep and
 * to be woken would take longer, which would be the generator's latency and not the server's. */
static bool is_due_soon(void)
{
    if (!run.delays_ns || run.next >= settings.messages)
        return false;
    uint64_t wake = due_ns(run.next) - SPIN_NS;
    if (now_ns() >= wake)
        return true;
    struct itimerspec when = {.it_value = {.tv_sec = wake / 1000000000u, .tv_nsec = wake % 1000000000u}};
    timerfd_settime(run.timer, TFD_TIMER_ABSTIME, &when, NULL);
    return false;
}

static void read_what_came(int wait_ms)
{
    struct epoll_event events[EVENTS_MAX];
    int count = epoll_wait(run.epoll, events, EVENTS_MAX, wait_ms);
    for (int i = 0; i < count; i++) {
        struct connection *connection = events[i].data.ptr;
        if (connection == NULL) {
            uint64_t expirations;
            if (read(run.timer, &expirations, sizeof expirations) < 0 && errno != EAGAIN)
                die("timer: %s", strerror(errno));
        } else if (events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) {
            receive(connection);
        }
    }
}

static void pump(bool (*is_done)(void))
{
    while (!is_done()) {
        int wait_ms = WAIT_MS;
        for (unsigned i = 0; i < run.producers_count; i++) {
            bool has_more = top_up(&run.producers[i]);
            flush(&run.producers[i]);
            if (has_more && !run.producers[i].wants_room)
                wait_ms = 0; /* the socket has taken all of it, and nothing else would wake us */
        }
        for (unsigned i = 0; i < run.consumers_count; i++)
            flush(&run.consumers[i]);
        read_what_came(is_due_soon() ? 0 : wait_ms);
        if (now_ns() > run.deadline_ns)
            die("not done after %g s: %" PRIu64 " messages, %" PRIu64 " sent, %" PRIu64 " confirmed, %" PRIu64
                " arrived, %" PRIu64 " acknowledged, %" PRIu64 " answered",
                settings.seconds_max, run.total, run.next, run.confirmed.count, run.arrived.count, run.acknowledged,
                run.answered.count);
    }
}

static bool is_over(void)
{
    const struct mode *mode = settings.mode;
    if (mode->first)
        return run.arrived.count > 0;
    if (mode->requests && run.answered.count < run.total)
        return false;
    if (mode->consumes && run.arrived.count < run.total)
        return false;
    if (mode->produces && settings.wire->confirms && run.confirmed.count < run.total)
        return false;
    if (mode->produces && !mode->consumes && settings.wire->probe)
        return run.probes_answered == run.producers_count;
    return true;
}

/* --- the end ---------------------------------------------------------------------------------------- */

static bool is_all_acknowledged(void)
{
    return run.acknowledged == run.total;
}

static bool is_through(void)
{
    return is_over() && (!settings.wire->answers_acks || is_all_acknowledged());
}

/* Takes one message after the other through queues that are called by its number. */
static void move_through_queues(void)
{
    static char queue[256];
    const char *name = settings.queue;
    struct connection *producer = &run.producers[0], *consumer = &run.consumers[0];
    const struct wire *wire = settings.wire;
    settings.queue = queue;
    for (uint64_t number = 0; number < settings.messages; number++) {
        if (number && wire->leave)
            wire->leave(consumer);
        flush(consumer);
        block(consumer, true);
        block(producer, true);
        snprintf(queue, sizeof queue, "%.200s.%06" PRIu64, name, number);
        if (wire->prepare)
            wire->prepare();
        if (wire->greet) {
            wire->greet(consumer);
            wire->greet(producer);
        }
        block(consumer, false);
        block(producer, false);
        consumer->asked = 0;
        run.total = number + 1;
        wire->ask(consumer);
        pump(is_through);
    }
}

static void part_with_all(void)
{
    for (unsigned i = 0; i < run.consumers_count; i++)
        part_with(&run.consumers[i]);
    for (unsigned i = 0; i < run.producers_count; i++)
        part_with(&run.producers[i]);
    free(run.consumers);
    free(run.producers);
}

static void prove_settled(void)
{
    if (settings.mode->first || settings.mode->idles)
        return;
    if (!settings.mode->consumes) {
        part_with_all(); /* the answers to probes are back in the queue then */
    } else if (settings.wire->answers_acks) {
        pump(is_all_acknowledged);
    } else if (settings.wire->is_settled) {
        part_with_all();
        open_all(0, 1);
        block(&run.consumers[0], true);
        while (!settings.wire->is_settled(&run.consumers[0])) {
            if (now_ns() > run.deadline_ns)
                die("all have arrived, and not all are settled after %g s", settings.seconds_max);
            usleep(10000);
        }
        part_with_all();
    } else {
        for (unsigned i = 0; i < run.consumers_count; i++)
            flush(&run.consumers[i]);
        usleep(settings.wire->settles_within_ms * 1000);
        part_with_all();
        run.total++;
        run.next = settings.messages;
        open_all(1, 1);
        settings.wire->ask(&run.consumers[0]);
        pump(is_over);
        part_with_all();
    }
}

/* As many as this user may have, for many connections. */
static void allow_files(void)
{
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
}

static int compare(const void *one, const void *other)
{
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return (a > b) - (a < b);
}

struct outcome run_it(void)
{
    const struct mode *mode = settings.mode;
    uint64_t messages = settings.messages;
    run.total = messages;
    run.next = mode->produces ? 0 : messages;
    seen_prepare(&run.arrived, "arrived", messages + 1);
    seen_prepare(&run.confirmed, "was confirmed", messages + 1);
    seen_prepare(&run.answered, "was answered", messages + 1);
    if (settings.in_flight_max)
        run.producer_of = allocate(messages, sizeof *run.producer_of);
    run.epoll = epoll_create1(0);
    run.timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    if (mode->paced) {
        run.latencies_ns = allocate(messages, sizeof *run.latencies_ns);
        run.delays_ns = allocate(messages, sizeof *run.delays_ns);
        struct epoll_event event = {.events = EPOLLIN};
        epoll_ctl(run.epoll, EPOLL_CTL_ADD, run.timer, &event);
    }
    allow_files();
    if (mode->idles)
        run.start_ns = now_ns();
    open_all(mode->produces ? settings.producers : 0, mode->consumes || mode->idles ? settings.consumers : 0);

    if (!mode->idles)
        run.start_ns = now_ns();
    run.deadline_ns = run.start_ns + (uint64_t)(settings.seconds_max * 1e9);
    if (mode->moves) {
        move_through_queues();
    } else if (!mode->idles) {
        for (unsigned i = 0; i < run.consumers_count; i++)
            settings.wire->ask(&run.consumers[i]);
        pump(is_over);
    }
    uint64_t end_ns = now_ns();

    struct outcome outcome = {
        .seconds = (end_ns - run.start_ns) / 1e9,
        .start_ns = run.start_ns,
        .end_ns = end_ns,
        .sent = mode->produces ? run.next : 0,
        .confirmed = run.confirmed.count,
        .received = run.arrived.count,
        .answered = run.answered.count,
        .latencies_ns = run.latencies_ns,
        .delays_ns = run.delays_ns,
    };
    prove_settled();
    outcome.acknowledged = mode->consumes ? messages : 0;
    if (mode->paced) {
        qsort(run.latencies_ns, messages, sizeof *run.latencies_ns, compare);
        qsort(run.delays_ns, messages, sizeof *run.delays_ns, compare);
    }
    return outcome;
}

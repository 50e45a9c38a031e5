/* A load generator for message brokers: what its files share.
 *
 * One process, one thread, one epoll loop drives producers and consumers of one queue over one of
 * several wires. It is written in C so that it is never what is being measured.
 *
 *     main.c             settings, what the modes are, the report
 *     run.c              connections, the loop, when a run is over
 *     proof.c            payloads, and the proof that each arrived once and whole
 *     wire_penstock.c    sspq, phpmq, rq
 *     wire_redis.c       redis-streams, redis-lists
 *     wire_beanstalkd.c  beanstalkd
 *
 * A wire turns "send message 7" and "I have room" into bytes, and bytes into calls of the four
 * functions under "what a wire tells the run". The run knows no protocol.
 *
 * How it fails: any surprise (an error answer, bytes that do not belong there, a message twice or
 * damaged, a connection that ends, a run over --seconds-max) ends the process with 1 and one line on
 * standard error. There is a report on standard output only where everything was as it should be.
 */

#ifndef LOADGEN_H
#define LOADGEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* --- settings ------------------------------------------------------------------------------------- */

struct mode {
    const char *name;
    bool produces, consumes;
    bool paced;    /* messages are due at fixed times, whatever the server does */
    bool requests; /* the consumer answers each message, and the producer waits for that */
    unsigned connections;   /* of each side, where the command line does not say */
    unsigned window;        /* of each consumer, likewise */
    unsigned in_flight_max; /* of each producer, likewise; 0: no bound */
};

struct settings {
    const struct wire *wire;
    const struct mode *mode;
    const char *host, *port, *queue;
    uint64_t messages;
    size_t size_bytes;
    unsigned producers, consumers, window, in_flight_max;
    double rate_per_second, seconds_max;
    uint64_t run; /* a number that all payloads of a run carry */
    bool acks_together;
};

extern struct settings settings;

__attribute__((noreturn, format(printf, 1, 2))) void die(const char *format, ...);
__attribute__((malloc)) void *allocate(size_t count, size_t size); /* zeroed; dies where there is none */

/* --- connections ---------------------------------------------------------------------------------- */

struct buffer {
    uint8_t *bytes;
    size_t start, end, capacity;
};

struct connection {
    int fd;
    unsigned number; /* among those of its side */
    bool is_producer;
    bool wants_room; /* the loop waits until the socket takes more */
    bool is_probed;
    struct buffer in, out;
    unsigned in_flight; /* producer: sent, and neither arrived nor answered */

    /* For wires on which a consumer asks for messages. */
    unsigned asked;          /* not answered yet */
    unsigned unacknowledged; /* acknowledgements that the server has not answered yet */

    /* For wire_redis.c: where in an answer to XREADGROUP the reading is. */
    unsigned place;
    unsigned entries_left;
    struct buffer ids; /* of the entries of this answer, as words of a command */
    unsigned ids_count;
};

uint8_t *room_for(struct buffer *buffer, size_t length); /* at its end; the caller moves the end */
void append(struct connection *connection, const void *bytes, size_t length);
__attribute__((format(printf, 2, 3))) void append_text(struct connection *connection, const char *format, ...);

/* Says `text` and waits for one line that begins with `answer`; for the time before the clock runs. */
void converse(struct connection *connection, const char *text, const char *answer);

/* --- wires ---------------------------------------------------------------------------------------- */

struct wire {
    const char *name;
    bool confirms;     /* each message that is sent is answered */
    bool answers_acks; /* each acknowledgement is answered */
    bool can_request;
    void (*prepare)(void);
    void (*greet)(struct connection *);                 /* before the clock runs; may converse */
    void (*send)(struct connection *, uint64_t number); /* a message */
    void (*ask)(struct connection *);                   /* as many messages as the window has room for */
    void (*probe)(struct connection *); /* where sends are not answered: something that is, after them */
    size_t (*read)(struct connection *, const uint8_t *bytes, size_t length); /* how many it has used */
};

extern const struct wire sspq, phpmq, rq, redis_streams, redis_lists, beanstalkd;

/* --- what a wire tells the run ---------------------------------------------------------------------- */

void arrived(struct connection *connection, const uint8_t *payload, size_t length);
void confirmed(uint64_t number);  /* where the answer names the message */
void confirmed_next(void);        /* where answers come in order */
void acknowledged(uint64_t count);
void answered(uint64_t number, const uint8_t *payload, size_t length);

/* Whether a consumer may ask for one more message: no more are asked for than there are, so that
 * nobody is left waiting, with acknowledgements behind the question, when the run is over. */
bool may_ask(void);

/* --- proof.c ---------------------------------------------------------------------------------------- */

struct seen {
    const char *what;
    uint64_t *bits;
    uint64_t count;
};

void proof_prepare(void);
void proof_write(uint8_t *payload, uint64_t number);
uint64_t proof_check(const uint8_t *payload, size_t length); /* the message's number */
void seen_prepare(struct seen *seen, const char *what, uint64_t messages);
void see(struct seen *seen, uint64_t number); /* dies the second time */

/* --- run.c ------------------------------------------------------------------------------------------ */

struct outcome {
    double seconds;
    uint64_t sent, confirmed, received, acknowledged, answered;
    uint64_t *latencies_ns; /* paced: scheduled to received, sorted */
    uint64_t *delays_ns;    /* paced: scheduled to sent, sorted: the generator's own share */
};

struct outcome run_it(void);

#endif

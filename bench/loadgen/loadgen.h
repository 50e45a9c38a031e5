/* A load generator for message brokers: what its files share.
 *
 * One process, one thread, one epoll loop drives producers and consumers of one queue over one of
 * several wires. It is written in C so that it is never what is being measured.
 *
 *     main.c             settings, what the modes are, the report
 *     run.c              the loop, when a run is over
 *     connection.c       one connection: buffers, beginning, end
 *     proof.c            payloads, and the proof that each arrived once and whole
 *     wire_penstock.c    sspq, phpmq, rq
 *     wire_redis.c       redis-streams, redis-lists
 *     wire_beanstalkd.c  beanstalkd
 *     wire_amqp.c        amqp, amqp-quorum, amqp-transient
 *     wire_nats.c        nats
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
    bool moves;    /* one message at a time, and each through a queue of its own */
    bool first;    /* it is over when one message has arrived, and nothing is acknowledged */
    bool idles;    /* connections that do nothing until standard input ends */
    unsigned connections;   /* of each side, where the command line does not say */
    unsigned consumers;     /* where there are not as many as producers */
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
    unsigned unconfirmed_max; /* of each producer, on wires that confirm */
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
    int fd, epoll;
    unsigned number; /* among those of its side */
    bool is_producer;
    bool wants_room; /* the loop waits until the socket takes more */
    bool is_probed;
    struct buffer in, out;
    unsigned in_flight;   /* producer: sent, and neither arrived nor answered */
    unsigned unconfirmed; /* producer: sent and not confirmed, on wires that confirm */

    /* For wires on which a consumer asks for messages. */
    unsigned asked;          /* not answered yet */
    unsigned unacknowledged; /* acknowledgements that the server has not answered yet */

    /* For wire_redis.c: where in an answer to XREADGROUP the reading is. */
    unsigned place;
    unsigned entries_left;
    struct buffer ids; /* of the entries of this answer, as words of a command */
    unsigned ids_count;

    /* For wire_amqp.c: what a delivery tag of this producer's channel stands for, and the consumer's last tag. */
    uint64_t *number_of_tag;
    uint64_t tags, tags_confirmed;
    uint64_t delivery_tag;

    unsigned queues_met; /* for wire_amqp.c and wire_nats.c: that it has asked, or greeted for, so far */
};

uint8_t *room_for(struct buffer *buffer, size_t length); /* at its end; the caller moves the end */
void append(struct connection *connection, const void *bytes, size_t length);
__attribute__((format(printf, 2, 3))) void append_text(struct connection *connection, const char *format, ...);

/* For the time before the clock runs: they wait. `hear` gives at least one byte. `converse` gives one line, which lasts
 * until the next call; `expect` dies where it does not begin with `answer`. */
void say(struct connection *connection, const void *bytes, size_t length);
size_t hear(struct connection *connection, void *bytes, size_t length_max);
const char *converse(struct connection *connection, const char *text);
void expect(struct connection *connection, const char *text, const char *answer);
void block(struct connection *connection, bool is_blocking);

void open_connection(struct connection *connection, unsigned number, bool is_producer, int epoll);
void flush(struct connection *connection);
void part_with(struct connection *connection); /* when the server has read everything and has ended it too */
const char *side(const struct connection *connection); /* for error messages */

/* --- wires ---------------------------------------------------------------------------------------- */

struct wire {
    const char *name;
    bool confirms;     /* each message that is sent is answered */
    bool answers_acks; /* each acknowledgement is answered */
    bool can_request;
    unsigned settles_within_ms; /* after the last acknowledgement, where an end that comes sooner takes some back */
    void (*prepare)(void);                              /* for this queue */
    void (*hello)(struct connection *);                 /* what a connection begins with; may converse */
    void (*greet)(struct connection *);                 /* for this queue, before the clock runs; may converse */
    void (*leave)(struct connection *);                 /* consumer: it will greet for another queue; not waited for */
    void (*goodbye)(struct connection *);               /* before an end that loses what is under way; may converse */
    void (*send)(struct connection *, uint64_t number); /* a message */
    void (*ask)(struct connection *);                   /* as many messages as the window has room for */
    void (*probe)(struct connection *); /* where sends are not answered: something that is, after them */
    size_t (*read)(struct connection *, const uint8_t *bytes, size_t length); /* how many it has used */
    bool (*is_settled)(struct connection *); /* asks whether nothing of the queue is left; may converse */
};

extern const struct wire sspq, phpmq, rq, redis_streams, redis_lists, beanstalkd;
extern const struct wire amqp, amqp_quorum, amqp_transient, nats;

/* --- what a wire tells the run ---------------------------------------------------------------------- */

void arrived(struct connection *connection, const uint8_t *payload, size_t length);
void confirmed(struct connection *connection, uint64_t number); /* where the answer names the message */
void confirmed_next(struct connection *connection);             /* where answers come in order */
void acknowledged(uint64_t count);
void answered(uint64_t number, const uint8_t *payload, size_t length);

/* Whether a consumer may ask for one more message: no more are asked for than there are, so that
 * nobody is left waiting, with acknowledgements behind the question, when the run is over. */
bool may_ask(void);
bool is_more_to_come(void); /* for wires on which a consumer asks for as many as there are */

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
    uint64_t start_ns, end_ns; /* of the system's monotonic clock */
    uint64_t sent, confirmed, received, acknowledged, answered;
    uint64_t *latencies_ns; /* paced: scheduled to received, sorted */
    uint64_t *delays_ns;    /* paced: scheduled to sent, sorted: the generator's own share */
};

struct outcome run_it(void);

#endif

/* The command line, what the modes are, and the report: one JSON object on standard output. */

#include "loadgen.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct mode modes[] = {
    {.name = "end-to-end", .produces = true, .consumes = true, .connections = 1, .window = 500},
    {.name = "publish", .produces = true, .connections = 1},
    {.name = "drain", .consumes = true, .connections = 1, .window = 500},
    {.name = "request", .produces = true, .consumes = true, .requests = true, .connections = 1, .window = 1000,
     .in_flight_max = 1000},
    {.name = "paced", .produces = true, .consumes = true, .paced = true, .connections = 1, .window = 500},
    {.name = "many", .produces = true, .consumes = true, .connections = 32, .window = 16, .in_flight_max = 16},
    {.name = "single", .produces = true, .consumes = true, .connections = 1, .consumers = 32, .window = 1},
    {.name = "queues", .produces = true, .consumes = true, .moves = true, .connections = 1, .window = 1},
    {.name = "first", .consumes = true, .first = true, .connections = 1, .window = 1},
    {.name = "idle", .idles = true, .connections = 10000},
};
static const struct wire *const wires[] = {&sspq, &phpmq, &rq, &redis_streams, &redis_lists, &beanstalkd,
                                           &amqp, &amqp_quorum, &amqp_transient, &nats};

enum { UNCONFIRMED_MAX = 5000, UNCONFIRMED_BYTES_MAX = 16 * 1024 * 1024 };

struct settings settings = {
    .host = "127.0.0.1",
    .queue = "bench",
    .messages = 100000,
    .size_bytes = 100,
    .rate_per_second = 2000,
    .seconds_max = 60,
    .run = 1,
};

void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("loadgen: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

void *allocate(size_t count, size_t size)
{
    void *memory = calloc(count, size);
    if (memory == NULL)
        die("no memory for %zu entries of %zu bytes", count, size);
    return memory;
}

/* --- the command line ------------------------------------------------------------------------------- */

static const char usage[] =
    "use: loadgen --wire WIRE --mode MODE --port PORT [--host HOST] [--queue NAME] [--messages N] [--size BYTES]\n"
    "             [--window N] [--producers N] [--consumers N] [--in-flight N] [--unconfirmed N] [--rate PER_SECOND]\n"
    "             [--seconds-max S] [--run NUMBER] [--acks each|together]\n"
    "wires: sspq phpmq rq redis-streams redis-lists beanstalkd amqp amqp-quorum amqp-transient nats\n"
    "modes: end-to-end publish drain request paced many single queues first idle\n";

static double number(const char *flag, const char *text, double least, double most)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= least && value <= most))
        die("%s %s: use a number from %g to %g", flag, text, least, most);
    return value;
}

static const struct mode *mode_named(const char *name)
{
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (!strcmp(modes[i].name, name))
            return &modes[i];
    die("--mode %s: there is no such mode\n%s", name, usage);
}

static const struct wire *wire_named(const char *name)
{
    for (size_t i = 0; i < sizeof wires / sizeof *wires; i++)
        if (!strcmp(wires[i]->name, name))
            return wires[i];
    die("--wire %s: there is no such wire\n%s", name, usage);
}

static void read_settings(int count, char **words)
{
    bool has_in_flight = false;
    for (int i = 1; i < count; i += 2) {
        const char *flag = words[i], *text = words[i + 1];
        if (i + 1 == count)
            die("%s: a value is missing\n%s", flag, usage);
        if (!strcmp(flag, "--wire"))
            settings.wire = wire_named(text);
        else if (!strcmp(flag, "--mode"))
            settings.mode = mode_named(text);
        else if (!strcmp(flag, "--host"))
            settings.host = text;
        else if (!strcmp(flag, "--port"))
            settings.port = text;
        else if (!strcmp(flag, "--queue"))
            settings.queue = text;
        else if (!strcmp(flag, "--messages"))
            settings.messages = number(flag, text, 1, 1e9);
        else if (!strcmp(flag, "--size"))
            settings.size_bytes = number(flag, text, 1, 1e9);
        else if (!strcmp(flag, "--window"))
            settings.window = number(flag, text, 1, 30000);
        else if (!strcmp(flag, "--producers"))
            settings.producers = number(flag, text, 1, 10000);
        else if (!strcmp(flag, "--consumers"))
            settings.consumers = number(flag, text, 1, 100000);
        else if (!strcmp(flag, "--unconfirmed"))
            settings.unconfirmed_max = number(flag, text, 1, 1e9);
        else if (!strcmp(flag, "--in-flight")) {
            settings.in_flight_max = number(flag, text, 0, 1e6);
            has_in_flight = true;
        } else if (!strcmp(flag, "--rate"))
            settings.rate_per_second = number(flag, text, 1, 1e7);
        else if (!strcmp(flag, "--seconds-max"))
            settings.seconds_max = number(flag, text, 0.01, 1e6);
        else if (!strcmp(flag, "--run"))
            settings.run = number(flag, text, 0, 1e15);
        else if (!strcmp(flag, "--acks") && (!strcmp(text, "each") || !strcmp(text, "together")))
            settings.acks_together = !strcmp(text, "together");
        else
            die("%s %s: there is no such flag or value\n%s", flag, text, usage);
    }
    if (settings.wire == NULL || settings.mode == NULL || settings.port == NULL)
        die("--wire, --mode and --port are needed\n%s", usage);
    if (settings.mode->requests && !settings.wire->can_request)
        die("--wire %s: only rq has requests with replies", settings.wire->name);
    if (strlen(settings.queue) > 200)
        die("--queue: a name of more than 200 bytes");
    const struct mode *mode = settings.mode;
    settings.producers = settings.producers ? settings.producers : mode->connections;
    unsigned consumers = mode->consumers ? mode->consumers : mode->connections;
    settings.consumers = settings.consumers ? settings.consumers : consumers;
    settings.window = settings.window ? settings.window : mode->window;
    settings.in_flight_max = has_in_flight ? settings.in_flight_max : mode->in_flight_max;
    if (!mode->consumes)
        settings.in_flight_max = 0; /* nothing would ever land */
    if (!settings.unconfirmed_max) {
        size_t fits = UNCONFIRMED_BYTES_MAX / settings.size_bytes + 1;
        settings.unconfirmed_max = fits < UNCONFIRMED_MAX ? fits : UNCONFIRMED_MAX;
    }
}

/* --- the report ------------------------------------------------------------------------------------- */

static void print_spread(const char *name, const uint64_t *sorted_ns, uint64_t count)
{
    static const struct {
        const char *name;
        double share;
    } marks[] = {{"p50", 0.5}, {"p99", 0.99}, {"p99.9", 0.999}, {"max", 1}};
    printf(", \"%s\": {", name);
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        uint64_t place = marks[i].share * count;
        place = place < count ? place : count - 1;
        printf("%s\"%s\": %.1f", i ? ", " : "", marks[i].name, sorted_ns[place] / 1e3);
    }
    printf("}");
}

int main(int count, char **words)
{
    read_settings(count, words);
    proof_prepare();
    if (settings.wire->prepare)
        settings.wire->prepare();
    struct outcome outcome = run_it();
    printf("{\"wire\": \"%s\", \"mode\": \"%s\", \"messages\": %" PRIu64 ", \"size\": %zu, \"seconds\": %.6f, "
           "\"per_second\": %.1f, \"sent\": %" PRIu64 ", \"confirmed\": %" PRIu64 ", \"received\": %" PRIu64
           ", \"acknowledged\": %" PRIu64 ", \"answered\": %" PRIu64 ", \"start\": %.6f, \"end\": %.6f",
           settings.wire->name, settings.mode->name, settings.messages, settings.size_bytes, outcome.seconds,
           settings.messages / outcome.seconds, outcome.sent, outcome.confirmed, outcome.received, outcome.acknowledged,
           outcome.answered, outcome.start_ns / 1e9, outcome.end_ns / 1e9);
    if (settings.mode->paced) {
        print_spread("latency_us", outcome.latencies_ns, settings.messages);
        print_spread("send_delay_us", outcome.delays_ns, settings.messages);
    }
    printf("}\n");
    if (settings.mode->idles) {
        fflush(stdout);
        while (getchar() != EOF) /* until whoever has started us has seen enough */
            ;
    }
    return 0;
}

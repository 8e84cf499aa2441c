#define _GNU_SOURCE
#include "scenario.h"

#include <ctype.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define SCENARIO_ENV "LAGGARD_NVML_DOUBLE_SCENARIO"
#define LOG_ENV "LAGGARD_NVML_DOUBLE_LOG"
#define EPOCH_ENV "LAGGARD_NVML_DOUBLE_EPOCH_NS"

#define BUCKETS 1024
#define MAX_ARGS 3
#define NOT_SUPPORTED 3

typedef struct entry {
    struct entry *next; /* in its bucket, the newest first: the last line that matches wins */
    char *name;
    char *value;
    uint32_t gpus;
    int argc;
    struct { unsigned low, high; } args[MAX_ARGS];
    unsigned calls[MAX_GPUS + 1];
} entry;

static entry *buckets[BUCKETS];
static int log_fd = -1;
static double epoch;

static const struct { const char *name; int code; } CODES[] = {
    {"SUCCESS", 0}, {"UNINITIALIZED", 1}, {"INVALID_ARGUMENT", 2}, {"NOT_SUPPORTED", 3},
    {"NO_PERMISSION", 4}, {"NOT_FOUND", 6}, {"INSUFFICIENT_SIZE", 7}, {"INSUFFICIENT_POWER", 8},
    {"DRIVER_NOT_LOADED", 9}, {"TIMEOUT", 10}, {"IRQ_ISSUE", 11}, {"LIBRARY_NOT_FOUND", 12},
    {"FUNCTION_NOT_FOUND", 13}, {"CORRUPTED_INFOROM", 14}, {"GPU_IS_LOST", 15},
    {"RESET_REQUIRED", 16}, {"OPERATING_SYSTEM", 17}, {"LIB_RM_VERSION_MISMATCH", 18},
    {"IN_USE", 19}, {"MEMORY", 20}, {"NO_DATA", 21}, {"INSUFFICIENT_RESOURCES", 23},
    {"ARGUMENT_VERSION_MISMATCH", 25}, {"DEPRECATED", 26}, {"NOT_READY", 27},
    {"GPU_NOT_FOUND", 28}, {"INVALID_STATE", 29}, {"UNKNOWN", 999},
};

static void die(const char *what, const char *detail) {
    fprintf(stderr, "nvml double: %s: %s\n", what, detail);
    abort();
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static unsigned hash(const char *text) {
    unsigned h = 2166136261u;
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 16777619u;
    return h % BUCKETS;
}

static char *trim(char *text) {
    while (isspace((unsigned char)*text)) text++;
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1])) *--end = 0;
    return text;
}

/* --- reading the file --- */

/* "3", "0-17" or "*" as a range; 0 when it is neither, so the dot belongs to the name. */
static int parse_range(const char *text, unsigned *low, unsigned *high) {
    char *end;
    if (!strcmp(text, "*")) {
        *low = 0, *high = UINT32_MAX;
        return 1;
    }
    if (!isdigit((unsigned char)*text)) return 0;
    *low = *high = strtoul(text, &end, 0);
    if (*end == '-') *high = strtoul(end + 1, &end, 0);
    return *end == 0;
}

static void add(const char *key, const char *value, uint32_t gpus) {
    entry *e = calloc(1, sizeof *e);
    char *dot;
    e->name = strdup(key);
    e->gpus = gpus;
    while ((dot = strrchr(e->name, '.')) && e->argc < MAX_ARGS) {
        unsigned low, high;
        if (!parse_range(dot + 1, &low, &high)) break;
        memmove(e->args + 1, e->args, e->argc * sizeof e->args[0]);
        e->args[0].low = low, e->args[0].high = high;
        e->argc++;
        *dot = 0;
    }
    /* ${NAME} is the environment's */
    char out[TEXT_SIZE];
    size_t used = 0;
    while (*value && used < sizeof out - 1) {
        const char *close;
        if (value[0] == '$' && value[1] == '{' && (close = strchr(value, '}'))) {
            char name[64];
            snprintf(name, sizeof name, "%.*s", (int)(close - value - 2), value + 2);
            const char *found = getenv(name);
            if (!found) die("environment variable is not set", name);
            used += snprintf(out + used, sizeof out - used, "%s", found);
            value = close + 1;
        } else {
            out[used++] = *value++;
        }
    }
    out[used] = 0;
    e->value = strdup(out);
    unsigned slot = hash(e->name);
    e->next = buckets[slot];
    buckets[slot] = e;
}

static uint32_t parse_gpus(char *text) {
    uint32_t mask = 0;
    for (char *part = strtok(text, ", "); part; part = strtok(NULL, ", ")) {
        unsigned low, high;
        if (!parse_range(part, &low, &high)) die("bad GPU list", part);
        for (unsigned i = low; i <= high && i < MAX_GPUS; i++) mask |= 1u << i;
    }
    return mask;
}

static void read_file(const char *path, int depth) {
    char line[TEXT_SIZE];
    uint32_t gpus = UINT32_MAX;
    FILE *file = depth < 9 ? fopen(path, "r") : NULL;
    if (!file) die("cannot read scenario", path);
    while (fgets(line, sizeof line, file)) {
        char *hash_sign = strchr(line, '#');
        if (hash_sign) *hash_sign = 0;
        char *text = trim(line);
        if (!*text) continue;
        if (*text == '[') {
            char *close = strchr(text, ']');
            if (!close) die("section without ]", text);
            *close = 0;
            if (!strcmp(text, "[all")) gpus = UINT32_MAX;
            else if (!strncmp(text, "[gpu ", 5)) gpus = parse_gpus(text + 5);
            else die("section is neither [all] nor [gpu N]", text);
            continue;
        }
        char *equals = strchr(text, '=');
        if (!equals) die("line without =", text);
        *equals = 0;
        char *key = trim(text), *value = trim(equals + 1);
        if (!strcmp(key, "include")) {
            char next[TEXT_SIZE * 2];
            const char *slash = strrchr(path, '/');
            int folder = *value == '/' || !slash ? 0 : (int)(slash - path) + 1;
            snprintf(next, sizeof next, "%.*s%s", folder, path, value);
            read_file(next, depth + 1);
        } else {
            add(key, value, gpus);
        }
    }
    fclose(file);
}

void scenario_load(void) {
    const char *path = getenv(SCENARIO_ENV), *log = getenv(LOG_ENV), *start = getenv(EPOCH_ENV);
    epoch = start ? strtoull(start, NULL, 10) * 1e-9 : now();
    if (log) log_fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (!path) die("not set", SCENARIO_ENV);
    read_file(path, 0);
}

/* --- answering --- */

static entry *find(int gpu, const char *function, int argc, const unsigned *argv) {
    for (entry *e = buckets[hash(function)]; e; e = e->next) {
        if (strcmp(e->name, function) || e->argc > argc) continue;
        if (gpu >= 0 && !(e->gpus & (1u << gpu))) continue;
        int i = 0;
        while (i < e->argc && e->args[i].low <= argv[i] && argv[i] <= e->args[i].high) i++;
        if (i == e->argc) return e;
    }
    return NULL;
}

int scenario_number(const char *key, int otherwise) {
    entry *e = find(-1, key, 0, NULL);
    return e ? (int)strtol(e->value, NULL, 0) : otherwise;
}

static void sleep_seconds(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    while (nanosleep(&t, &t)) {}
}

/* What is being asked for, so that a call that never returns is in the log as well (code -1). */
static __thread struct {
    const device *d;
    const char *function;
    int argc;
    const unsigned *argv;
} current;

static void hang(const char *how) {
    log_call(current.d, current.function, current.argc, current.argv, -1);
    if (*how) { /* -hard, -d: only SIGKILL ends it */
        sigset_t all;
        sigfillset(&all);
        sigprocmask(SIG_BLOCK, &all, NULL);
    }
    if (!strcmp(how, "-d") && vfork() == 0) { /* a vfork parent is in state D */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) pause();
    }
    for (;;) sleep_seconds(3600);
}

static int code_of(const char *text) {
    if (isdigit((unsigned char)*text)) return atoi(text);
    for (size_t i = 0; i < sizeof CODES / sizeof *CODES; i++)
        if (!strcmp(CODES[i].name, text)) return CODES[i].code;
    die("unknown return code", text);
    return 0;
}

static char *part_of(char *text, char separator, unsigned which) {
    char *save, *part, separators[2] = {separator, 0};
    unsigned count = 1;
    for (const char *at = text; *at; at++) count += *at == separator;
    part = strtok_r(text, separators, &save);
    for (which %= count; which && part; which--) part = strtok_r(NULL, separators, &save);
    return part ? trim(part) : text;
}

/* Choose among alternatives, wait, and leave the plain value in `out`. */
static int settle(const char *value, int gpu, unsigned calls, answer *out) {
    char copy[TEXT_SIZE];
    snprintf(copy, sizeof copy, "%s", value);
    char *text = trim(copy);
    if (*text == '?') { /* ?N: the first N calls : afterwards */
        char *end;
        unsigned first = strtoul(text + 1, &end, 10);
        char *then = *end == ':' ? strstr(end + 1, " : ") : NULL;
        if (!then) die("not of the form ?N: a : b", text);
        *then = 0;
        return calls < first ? settle(end + 1, gpu, calls, out)
                             : settle(then + 3, gpu, calls - first, out);
    }
    if (strchr(text, '|')) text = part_of(text, '|', calls);
    if (*text == '@') text = part_of(text + 1, ',', gpu < 0 ? 0 : gpu);
    if (!strncmp(text, "~hang", 5)) hang(text + 5);
    if (*text == '~') {
        char *rest;
        sleep_seconds(strtod(text + 1, &rest) / 1000);
        if (strncmp(rest, "ms", 2)) die("not of the form ~Nms value", text);
        text = trim(rest + 2);
    }
    if (*text == '!') return code_of(text + 1);
    out->calls = calls;
    size_t used = 0;
    while (*text && used < sizeof out->text - 12) {
        if (!strncmp(text, "{i}", 3)) {
            used += sprintf(out->text + used, "%d", gpu);
            text += 3;
        } else {
            out->text[used++] = *text++;
        }
    }
    out->text[used] = 0;
    return 0;
}

static int settle_entry(entry *e, int gpu, answer *out) {
    unsigned calls = __atomic_fetch_add(&e->calls[gpu < 0 ? MAX_GPUS : gpu], 1, __ATOMIC_RELAXED);
    return settle(e->value, gpu, calls, out);
}

/* A MIG device's keys start with "mig." and take its number as their first argument. */
static entry *find_for(const device *d, const char *function, int argc, const unsigned *argv) {
    if (d->mig == NO_MIG) return find(d->index, function, argc, argv);
    char name[96];
    unsigned args[MAX_ARGS + 1] = {d->mig};
    snprintf(name, sizeof name, "mig.%s", function);
    memcpy(args + 1, argv, argc * sizeof *argv);
    return find(d->index, name, argc + 1, args);
}

int knows(const device *d, const char *function, int argc, const unsigned *argv) {
    return find_for(d, function, argc, argv) != NULL;
}

int ask(const device *d, const char *function, int argc, const unsigned *argv, answer *out) {
    int code = 0;
    current.d = d, current.function = function, current.argc = argc, current.argv = argv;
    entry *every = d->index < 0 ? NULL : find(d->index, "*", 0, NULL);
    if (every) code = settle_entry(every, d->index, out);
    if (!code) {
        entry *e = find_for(d, function, argc, argv);
        code = e ? settle_entry(e, d->index, out) : NOT_SUPPORTED;
    }
    log_call(d, function, argc, argv, code);
    return code;
}

int token(const answer *a, int which, char *out, int size) {
    const char *at = a->text;
    for (;; which--) {
        while (isspace((unsigned char)*at)) at++;
        size_t length = strcspn(at, " \t");
        if (!length) {
            *out = 0;
            return 0;
        }
        if (!which) {
            snprintf(out, size, "%.*s", (int)length, at);
            return 1;
        }
        at += length;
    }
}

static uint64_t with_unit(const char *text, char **end) {
    uint64_t value = *text == '-' ? (uint64_t)strtoll(text, end, 0) : strtoull(text, end, 0);
    static const struct { const char *name; int shift; } UNITS[] = {
        {"KiB", 10}, {"MiB", 20}, {"GiB", 30}};
    for (int i = 0; i < 3; i++)
        if (!strncmp(*end, UNITS[i].name, 3)) {
            *end += 3;
            return value << UNITS[i].shift;
        }
    return value;
}

uint64_t number(const answer *a, int which) {
    char text[64], *end;
    if (!token(a, which, text, sizeof text)) return 0;
    if (!strcmp(text, "-")) return UINT64_MAX; /* NVML_VALUE_NOT_AVAILABLE */
    if (*text != '^') {
        uint64_t value = with_unit(text, &end);
        if (*end) die("not a number", a->text);
        return value;
    }
    uint64_t base = with_unit(text + 1, &end);
    if (*end != '+') die("not of the form ^base+rate", text);
    double rate = strtod(end + 1, &end);
    if (!strcmp(end, "/call")) return base + (uint64_t)(rate * a->calls);
    if (*end) die("not of the form ^base+rate", text);
    double elapsed = now() - epoch;
    return base + (uint64_t)(rate * (elapsed > 0 ? elapsed : 0));
}

double real(const answer *a, int which) {
    char text[64];
    return token(a, which, text, sizeof text) ? strtod(text, NULL) : 0;
}

void log_call(const device *d, const char *function, int argc, const unsigned *argv, int code) {
    if (log_fd < 0) return;
    char line[256], *at = line, *end = line + sizeof line;
    at += d->index < 0 ? snprintf(at, end - at, "system ") : snprintf(at, end - at, "gpu%d ", d->index);
    at += snprintf(at, end - at, d->mig == NO_MIG ? "%s" : "mig.%s", function);
    for (int i = 0; i < argc; i++) at += snprintf(at, end - at, ".%u", argv[i]);
    at += snprintf(at, end - at, " %d\n", code);
    if (write(log_fd, line, at - line) < 0) return;
}

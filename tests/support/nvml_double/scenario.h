/* The scenario file: what the double answers. The format is documented in __init__.py. */
#ifndef SCENARIO_H
#define SCENARIO_H

#include <stdint.h>

#define MAX_GPUS 32
#define MAX_MIG 8
#define TEXT_SIZE 2048
#define NO_MIG (-1)

typedef struct device {
    int index; /* -1 stands for the system */
    int mig;   /* the MIG device under that GPU, or NO_MIG */
} device;

/* One answer: the chosen value, and how often it had been asked for before. */
typedef struct answer {
    char text[TEXT_SIZE];
    unsigned calls;
} answer;

void scenario_load(void);
int scenario_number(const char *key, int otherwise);

/* Look `function` up for the device and these arguments; the return code of the NVML call.
 * NVML_ERROR_NOT_SUPPORTED when the scenario does not know it. May sleep, or never return. */
int ask(const device *d, const char *function, int argc, const unsigned *argv, answer *out);
int knows(const device *d, const char *function, int argc, const unsigned *argv);

/* The parts of an answer: blank-separated tokens, `^base+rate` already moved on. */
int token(const answer *a, int which, char *out, int size);
uint64_t number(const answer *a, int which);
double real(const answer *a, int which);

void log_call(const device *d, const char *function, int argc, const unsigned *argv, int code);

#endif

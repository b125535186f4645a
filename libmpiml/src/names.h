/* names.h: finds what a name means in the program, or says which names there are. */
#ifndef MPIML_NAMES_H
#define MPIML_NAMES_H

#include "manifest.h"

/* NULL, and the text of MPIML_ERR_TOPIC, if there is none. */
mi_topic *mi_topic_named(const char *name);

/* The replica of "label" for this guest, or of "label/2". NULL, with the text of
 * MPIML_ERR_SERVICE, if there is none or it was not given to this node. */
const mi_replica *mi_replica_named(const char *name, const mi_service **service);

/* MPIML_OK if the service has a method of this name that can be called from here. */
int mi_method_named(const mi_service *service, const char *name);

/* MPIML_OK if this node was given a parameter server of this label. */
int mi_server_named(const char *label);

#endif
